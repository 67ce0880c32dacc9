"""Plans that can be checked by hand, and the golden digest."""

from tests.unit.plan.worlds import both, cut, layouts

from reshard.dtypes import parse_dtype
from reshard.ids import FQN, GroupRank
from reshard.layout.holding import RankLayout, TensorLayout
from reshard.layout.region import Region
from reshard.layout.sharding import Mesh, Replicate, Shard, Sharding
from reshard.layout.side import SideLayout
from reshard.plan import make_plan


def test_rows_over_two_to_columns_over_four() -> None:
    """Each of four column holders gets a 4 x 2 tile from each of two row holders."""
    plan = make_plan(*both({"w": (cut(2, 0), cut(4, 1, first=2))}))
    assert {(t.source, t.destination): t.regions for t in plan.transfers()} == {
        (source, 2 + column): (Region((4 * source, 2 * column), (4, 2)),)
        for source in range(2)
        for column in range(4)
    }
    assert plan.received_bytes == dict.fromkeys(range(2, 6), 2 * 4 * 2 * 4)
    assert plan.sent_bytes == dict.fromkeys(range(2), 4 * 4 * 2 * 4)


def test_four_column_shards_to_four_full_copies() -> None:
    """Each of four ranks receives the whole tensor, an 8 x 2 tile from each column holder."""
    whole = Sharding(Mesh((4,), (4, 5, 6, 7)), (Replicate(),), (8, 8))
    plan = make_plan(*both({"w": (cut(4, 1), whole)}))
    assert {(t.source, t.destination): t.regions for t in plan.transfers()} == {
        (source, 4 + copy): (Region((0, 2 * source), (8, 2)),)
        for source in range(4)
        for copy in range(4)
    }
    assert plan.received_bytes == dict.fromkeys(range(4, 8), 8 * 8 * 4)
    assert plan.sent_bytes == dict.fromkeys(range(4), 8 * 8 * 4)


def test_a_rank_on_both_sides_keeps_its_overlap() -> None:
    plan = make_plan(*both({"w": (cut(2, 0), cut(2, 1))}))
    assert {(t.source, t.destination): t.regions for t in plan.transfers()} == {
        (0, 0): (Region((0, 0), (4, 4)),),
        (0, 1): (Region((0, 4), (4, 4)),),
        (1, 0): (Region((4, 0), (4, 4)),),
        (1, 1): (Region((4, 4), (4, 4)),),
    }
    assert plan.sent_bytes == plan.received_bytes == {0: 4 * 4 * 4, 1: 4 * 4 * 4}
    assert plan.kept_bytes == 2 * 4 * 4 * 4
    assert plan.redundancy == 1.0


def test_a_rank_that_holds_all_it_needs_is_left_alone() -> None:
    plan = make_plan(*both({"w": (cut(2, 0), cut(2, 0))}))
    assert plan.sent_bytes == plan.received_bytes == {}
    assert plan.bounds.max_sent_bytes == plan.bounds.max_received_bytes == 0
    assert plan.redundancy == 1.0


def test_layers_that_lie_alike_are_planned_once() -> None:
    case = {f"layers.{i}.w": (cut(2, 0), cut(4, 1, first=2)) for i in range(100)}
    plan = make_plan(*both(case))
    assert len(plan.classes) == 1
    assert len(plan.ops) == 8
    assert len(plan.for_rank(GroupRank(0)).sends[GroupRank(2)]) == 100


def test_engine_replicas_share_the_operations() -> None:
    """Data-parallel engine ranks need the same: one operation names them all."""
    replicas = Sharding(Mesh((16, 2), tuple(range(4, 36))), (Replicate(), Shard(1)), (8, 8))
    plan = make_plan(*both({"w": (cut(4, 0), replicas)}))
    assert len(plan.ops) == 4 * 2
    assert all(len(op.destinations) == 16 for op in plan.ops)


def test_trainer_replicas_share_the_sending() -> None:
    """HSDP: two replicas of two shards; every trainer rank sends the same."""
    source = Sharding(Mesh((2, 2), (0, 1, 2, 3)), (Replicate(), Shard(0)), (8, 8))
    plan = make_plan(*both({"w": (source, cut(2, 1, first=4))}))
    assert plan.sent_bytes == dict.fromkeys(range(4), 8 * 8 * 4 // 4)


def test_one_name_in_two_wire_dtypes() -> None:
    """A bf16 parameter and an fp32 one may be fed by the same checkpoint tensor."""
    whole, rows = Region((0, 0), (8, 8)), Region((0, 0), (2, 8))
    wanted = RankLayout(
        GroupRank(2),
        (
            TensorLayout(FQN("w"), (8, 8), "bfloat16", (whole,)),
            TensorLayout(FQN("w"), (8, 8), "float32", (rows,)),
        ),
    )
    plan = make_plan(layouts([("w", cut(2, 0), "float32")]), [wanted])
    assert plan.received_bytes == {2: 8 * 8 * 2 + 2 * 8 * 4}
    assert {m.wire_dtype for m in plan.for_rank(GroupRank(0)).sends[GroupRank(2)]} == {
        "bfloat16",
        "float32",
    }


def test_unused_sources_are_listed() -> None:
    sources = layouts([("w", cut(2, 0), "float32"), ("optimizer", cut(2, 0), "float32")])
    plan = make_plan(sources, layouts([("w", cut(2, 1, first=2), "float32")]))
    assert plan.unused_sources == ("optimizer",)


def test_no_tensors() -> None:
    plan = make_plan([], [])
    assert (plan.ops, plan.redundancy, plan.bounds.max_sent_bytes) == ((), 1.0, 0)


def test_golden_digest() -> None:
    """Processes of one run compare digests: a change of the plan's encoding has to be meant."""
    plan = make_plan(*both({"w": (cut(2, 0), cut(4, 1, first=2))}))
    assert plan.digest == "5354ec8537a31bf244558ffb67a0c6c31732fad2fa1182a19367691928ad2465"


def test_a_large_world_is_a_few_thousand_operations() -> None:
    """A dense 70B model, FSDP over 256 ranks to 16 replicas of 8 tensor-parallel ranks."""
    shapes = {"q": ((8192, 8192), 0), "up": ((28672, 8192), 0), "down": ((8192, 28672), 1)}
    trainer, engine = Mesh((256,), tuple(range(256))), Mesh((16, 8), tuple(range(256, 384)))
    held, needed = [], []
    for kind, (shape, dim) in shapes.items():
        names = [FQN(f"model.layers.{i}.{kind}.weight") for i in range(80)]
        held.append((names, Sharding(trainer, (Shard(0),), shape), parse_dtype("float32")))
        cut_engine = Sharding(engine, (Replicate(), Shard(dim)), shape)
        needed.append((names, cut_engine, parse_dtype("bfloat16")))
    plan = make_plan(SideLayout.from_shardings(held), SideLayout.from_shardings(needed))
    # A row of tensors comes from one rank in 8 of 256 steps, a column from all ranks.
    assert len(plan.ops) == 256 + 256 + 256 * 8
    model = 80 * 2 * 8192 * (8192 + 28672 + 28672)
    assert plan.received_bytes == dict.fromkeys(range(256, 384), model // 8)
    assert plan.sent_bytes == dict.fromkeys(range(256), model * 16 // 256)
    assert plan.redundancy == 1.0
    part = plan.for_rank(GroupRank(300))
    assert sum(map(len, part.receives.values())) == 80 * (32 + 32 + 256)
