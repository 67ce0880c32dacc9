"""Methods of refitting: closed forms, conservation of bytes, and the rules of others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.plan.test_case import Json, read, tensor
from tests.unit.plan.test_page import mesh
from tests.unit.plan.worlds import Case, cases, sides
from tests.unit.simulation.test_machine import slow

from reshard.layout.side import SideLayout
from reshard.plan import make_plan
from reshard.simulation.machine import Machine
from reshard.simulation.methods import (
    Refit,
    broadcast_all,
    broadcast_one,
    broadcast_stages,
    by_rule,
    compare,
    direct_share,
    of_model,
    pairs_of,
    pull,
    reshard,
)
from reshard.simulation.models import Experts, Grouped, ModelShape, decoder, model
from reshard.simulation.parallelism import Parallelism, parse_parallelism
from reshard.simulation.rules import NEMO_RL, VLLM_M2N


def refit_of(*tensors: Json) -> Refit:
    case = read(*tensors)
    return Refit(*case.sides(), (tuple(map(int, case.source_ranks)),), {})


ROWS_TO_COLUMNS = refit_of(tensor(destination=mesh([4], 2, "S1")))
COLUMNS_TO_FULL = refit_of(tensor(source=mesh([4], 0, "S1"), destination=mesh([4], 4, "R")))

TINY = decoder(
    "tiny",
    vocabulary=128,
    hidden=32,
    layers=4,
    attention=Grouped(4, 2, 8, norms=True),
    width=64,
    experts=Experts(8, 16, dense_layers=1, shared=1, corrected=True),
)


def tiny(trainer: str, engine: str) -> Refit:
    return of_model(
        TINY, parse_parallelism(trainer), parse_parallelism(engine), "float32", "bfloat16"
    )


def test_rows_over_two_to_columns_over_four() -> None:
    """Each trainer rank sends four tiles of 32 bytes: 128 s at a byte a second."""
    assert reshard(ROWS_TO_COLUMNS, slow(6)).seconds == pytest.approx(128)
    # Gathered: rank 0 lacks 128 bytes. Broadcast: 256 bytes leave it.
    assert broadcast_one(ROWS_TO_COLUMNS, slow(6)).seconds == pytest.approx(128 + 256)
    assert broadcast_one(ROWS_TO_COLUMNS, slow(6)).redundancy == pytest.approx(4)


def test_four_column_shards_to_four_full_copies() -> None:
    """All engine ranks need all: no plan receives less than 256 bytes."""
    assert reshard(COLUMNS_TO_FULL, slow(8)).seconds == pytest.approx(256)
    assert broadcast_one(COLUMNS_TO_FULL, slow(8)).seconds == pytest.approx(192 + 256)
    # From all four ranks: each gathers 48 bytes of its 64, and the chain carries 256.
    assert broadcast_all(COLUMNS_TO_FULL, slow(8)).seconds == pytest.approx(48 + 256)


def test_a_loader_takes_its_time_for_each_tensor() -> None:
    with_loader = slow(6, loader_us=1e6)
    assert broadcast_one(ROWS_TO_COLUMNS, with_loader).seconds == pytest.approx(128 + 256 + 1)
    assert reshard(ROWS_TO_COLUMNS, with_loader).seconds == pytest.approx(128)


def test_stages_gather_and_broadcast_beside_each_other() -> None:
    two = refit_of(
        tensor(name="a", destination=mesh([2], 4, "R")),
        tensor(name="b", source=mesh([2], 2, "S0"), destination=mesh([2], 4, "R")),
    )
    staged = Refit(two.sources, two.destinations, ((0, 1), (2, 3)), {})
    # Each root gathers 128 bytes and gives 256; the chain of engine ranks carries both.
    assert broadcast_stages(staged, slow(6)).seconds == pytest.approx(128 + 512)
    assert broadcast_one(staged, slow(6)).seconds == pytest.approx((128 + 256) + 512)


@given(cases())
def test_the_bytes_are_those_of_the_plan(case: Case) -> None:
    sources, destinations = sides(case)
    plan = make_plan(sources, destinations)
    assert sum(pairs_of(plan).values()) == sum(plan.received_bytes.values())
    refit = Refit(sources, destinations, (_ranks(sources),), {})
    needed = sum(refit.needs().values())
    ours = reshard(refit, Machine(70, 2))
    assert ours.received_bytes == needed == plan.kept_bytes + sum(plan.received_bytes.values())
    assert ours.redundancy == 1.0


def _ranks(side: SideLayout) -> tuple[int, ...]:
    return tuple(sorted({rank for group in side.groups for rank, _ in group.by_rank})) or (0,)


layouts = st.sampled_from(
    ["fsdp=4", "fsdp=4,ep=2", "tp=2,pp=2", "tp=2,dp=2,ep=4", "pp=4", "fsdp=2,tp=2", "dp=4,ep=2"]
)
engines = st.sampled_from(["tp=4", "tp=2,dp=2", "dp=4,ep=4", "tp=2,dp=2,ep=2,etp=2", "tp=8"])


@given(layouts, engines)
def test_only_the_plan_receives_no_byte_twice(trainer: str, engine: str) -> None:
    refit = tiny(trainer, engine)
    ours, *others = reversed(list(compare(refit, slow(8, 2), (VLLM_M2N, NEMO_RL))))
    assert (ours.method, ours.redundancy) == ("reshard", 1.0)
    assert sum(refit.wire_bytes().values()) == 2 * TINY.elements
    for other in others:
        assert other.needed_bytes == ours.needed_bytes
        assert other.redundancy >= 1.0
        if "broadcast" in other.method:
            assert other.received_bytes == len(refit.engine_ranks) * 2 * TINY.elements


@settings(max_examples=20)
@given(layouts, engines, st.floats(1, 100))
def test_a_slower_machine_is_never_faster(trainer: str, engine: str, factor: float) -> None:
    refit = tiny(trainer, engine)
    for rates in (
        {"link_gbps": 400 / factor},
        {"local_gbps": 3600 / factor},
        {"copy_gbps": 13400 / factor},
        {"latency_us": 20 * factor},
        {"loader_us": 30 * factor},
        {"bucket_mib": 256 / factor},
    ):
        before = compare(refit, Machine(8, 2), (VLLM_M2N,))
        after = compare(refit, Machine(8, 2, **rates), (VLLM_M2N,))
        for fast, lame in zip(before, after, strict=True):
            assert lame.seconds >= fast.seconds * 0.999999, (fast.method, rates)


@pytest.mark.parametrize(
    ("name", "rule", "percent"),
    [
        # vLLM's own rule: 29 % of a dense model, 1.4 % of one with experts.
        ("qwen3-8b", VLLM_M2N, 29.5),
        ("qwen3-30b-a3b", VLLM_M2N, 1.4),
        # What NeMo-RL publishes as its "XferDTensor fraction": 97.6 % and 95.0 %.
        ("deepseek-v3", NEMO_RL, 97.6),
        ("qwen3-30b-a3b", NEMO_RL, 95.0),
    ],
)
def test_the_share_of_bytes_that_a_rule_lets_through(
    name: str, rule: object, percent: float
) -> None:
    assert rule in (VLLM_M2N, NEMO_RL)
    chosen = VLLM_M2N if rule is VLLM_M2N else NEMO_RL
    refit = of_model(model(name), Parallelism(fsdp=8), Parallelism(tp=8), "bfloat16", "bfloat16")
    assert round(100 * direct_share(refit, chosen), 1) == percent


def test_a_module_with_a_tensor_that_falls_back_falls_back_whole() -> None:
    """The router of TINY has a correction bias beside its weight, as DeepSeek's."""
    refit = tiny("fsdp=4", "tp=2")
    direct = VLLM_M2N.direct(refit.families, 2)
    assert direct == {
        *(f"model.layers.{i}.self_attn.o_proj.weight" for i in range(4)),
        "model.layers.0.mlp.down_proj.weight",
        *(f"model.layers.{i}.mlp.shared_experts.down_proj.weight" for i in range(1, 4)),
    }


def test_uneven_shards_fall_back() -> None:
    refit = tiny("fsdp=4", "tp=2")
    assert VLLM_M2N.direct(refit.families, 3) == frozenset()


def test_a_rule_moves_what_it_lets_through_once_and_the_rest_everywhere() -> None:
    refit = tiny("fsdp=4", "tp=2")
    share = direct_share(refit, VLLM_M2N)
    total = 2 * TINY.elements
    found = by_rule(refit, slow(8), VLLM_M2N)
    # Two engine ranks: the direct part is cut in halves, the rest reaches both in full.
    assert found.received_bytes == pytest.approx(share * total + 2 * (1 - share) * total)


def test_pull_gathers_first() -> None:
    gather, transfer = pull(ROWS_TO_COLUMNS, slow(6)).phases
    assert gather.seconds == pytest.approx(128)
    # Both trainer ranks hold all now: they send half of 256 bytes each.
    assert transfer.seconds == pytest.approx(128)


def bytes_by_rank(shape: ModelShape, over: str) -> dict[int, int]:
    parallelism = parse_parallelism(over)
    refit = of_model(shape, Parallelism(), parallelism, "bfloat16", "bfloat16")
    return {rank - 1: nbytes // 2 for rank, nbytes in refit.needs().items()}


def test_bytes_of_a_rank_by_hand() -> None:
    expert = 3 * 32 * 16
    rest = TINY.elements - 3 * 8 * expert
    assert sum(bytes_by_rank(TINY, "fsdp=8").values()) == TINY.elements
    assert set(bytes_by_rank(TINY, "dp=4,ep=4").values()) == {rest + 3 * 2 * expert}
    # Cut in four: the vocabulary, q, o, the dense and the shared feed-forward; k and v in two.
    cut = 2 * 128 * 32 + 4 * 2 * 32 * 32 + 3 * 64 * 32 + 3 * expert
    halved = 4 * 2 * 16 * 32
    quarter = rest - cut - halved + cut // 4 + halved // 2 + 3 * 8 * expert // 4
    assert set(bytes_by_rank(TINY, "tp=4").values()) == {quarter}


def test_pipeline_stages_hold_their_layers() -> None:
    refit = of_model(TINY, parse_parallelism("pp=2"), Parallelism(), "bfloat16", "bfloat16")
    names = {
        rank: {n for g in refit.sources.groups if g.by_rank[0][0] == rank for n in g.names}
        for rank in (0, 1)
    }
    assert "model.embed_tokens.weight" in names[0]
    assert "lm_head.weight" in names[1]
    assert not any(".layers.2." in name or ".layers.3." in name for name in names[0])
    assert len(names[0]) + len(names[1]) == TINY.tensors
