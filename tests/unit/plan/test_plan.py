"""Plans: the COVER oracle (element sets), an LP for the balance, the published layout cases."""

import json
from collections import Counter, defaultdict
from fractions import Fraction
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from tests.unit.layout.strategies import elements, enumerate_shard
from tests.unit.plan.worlds import Case, both, cases, layouts

from reshard.dtypes import parse_dtype
from reshard.errors import PlanError
from reshard.ids import FQN, GroupRank
from reshard.layout.holding import RankLayout, TensorLayout
from reshard.layout.region import Region
from reshard.layout.sharding import Mesh, Placement, Replicate, Shard, Sharding
from reshard.plan import TransferPlan, make_plan, split_into_buckets
from reshard.plan.senders import balance

MATRIX = json.loads((Path(__file__).parents[2] / "data" / "reshard_matrix.json").read_text())


def received(plan: TransferPlan) -> dict[tuple[str, int], Counter[int]]:
    """How often each destination rank gets each element of each tensor."""
    got: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    for op in plan.ops:
        for move in plan.moves(op):
            shape = plan.classes[op.tensors].shape
            got[move.name, op.destination].update(
                elements(shape, move.region.offset, move.region.shape)
            )
    return got


def assert_covers(plan: TransferPlan, case: Case) -> None:
    """COVER: every destination element once, from a rank that holds it, own ones kept."""
    got = received(plan)
    for name, (source, destination) in case.items():
        held = {r: set(enumerate_shard(source, r).reshape(-1).tolist()) for r in source.mesh.ranks}
        for rank in destination.mesh.ranks:
            wanted = enumerate_shard(destination, rank).reshape(-1).tolist()
            assert got[name, rank] == Counter(wanted)
        for op in plan.ops:
            if name not in {move.name for move in plan.moves(op)}:
                continue
            moved = set(elements(source.shape, op.region.offset, op.region.shape))
            assert moved <= held[op.source]
            if op.source != op.destination:
                assert not moved & held.get(op.destination, set())


@given(cases())
def test_every_destination_element_comes_once_from_a_holder(case: Case) -> None:
    plan = make_plan(*both(case))
    assert_covers(plan, case)
    assert plan.redundancy == 1.0
    assert max(plan.received_bytes.values(), default=0) == plan.bounds.max_received_bytes


@given(cases())
def test_the_order_of_ranks_does_not_matter(case: Case) -> None:
    sources, destinations = both(case)
    plan = make_plan(sources, destinations)
    assert make_plan(list(reversed(sources)), list(reversed(destinations))).digest == plan.digest


@given(cases(), st.integers(4, 64))
def test_both_ends_cut_the_same_buckets(case: Case, bucket_bytes: int) -> None:
    plan = make_plan(*both(case))
    ranks = {op.source for op in plan.ops} | {op.destination for op in plan.ops}
    parts = {rank: plan.for_rank(GroupRank(rank)) for rank in ranks}
    for rank, part in parts.items():
        for peer, moves in part.sends.items():
            assert moves == parts[peer].receives[GroupRank(rank)]
            buckets = split_into_buckets(moves, bucket_bytes)
            assert all(bucket.nbytes <= bucket_bytes for bucket in buckets)
            cut = [m for bucket in buckets for m in bucket.moves]
            assert numbers(plan, cut) == numbers(plan, moves)


def numbers(plan: TransferPlan, moves: object) -> dict[str, Counter[int]]:
    shapes = {name: c.shape for c in plan.classes for name in c.names}
    counted: dict[str, Counter[int]] = defaultdict(Counter)
    for move in moves:  # type: ignore[attr-defined]
        if move.region.volume:
            counted[move.name].update(
                elements(shapes[move.name], move.region.offset, move.region.shape)
            )
    return counted


def placement(text: str) -> Placement:
    return Replicate() if text == "R" else Shard(int(text[1:]))


def side(case: dict[str, object], key: str) -> Sharding:
    given_side = case[key]
    assert isinstance(given_side, dict)
    mesh = tuple(given_side["mesh"])
    ranks = tuple(range(given_side["start"], given_side["start"] + prod(mesh)))
    shape: tuple[int, ...] = tuple(case["global_shape"])  # type: ignore[arg-type]
    return Sharding(Mesh(mesh, ranks), tuple(map(placement, given_side["placements"])), shape)


@pytest.mark.parametrize("case", MATRIX["cases"], ids=lambda case: case["id"])
def test_published_layouts_are_covered_exactly(case: dict[str, object]) -> None:
    source, destination = side(case, "src"), side(case, "dst")
    for key, sharding in (("src", source), ("dst", destination)):
        for rank in sharding.mesh.ranks:
            assert sharding.local_shape(rank) == tuple(case[key]["local_shape"])  # type: ignore[index]
    dtype = parse_dtype(str(case["dtype"]))
    plan = make_plan(*both({"w": (source, destination)}, dtype, dtype))
    assert plan.redundancy == 1.0
    cells: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.int8]]] = {
        r: np.zeros(source.shape, np.int8) for r in destination.mesh.ranks
    }
    for op in plan.ops:
        box = tuple(map(slice, op.region.offset, op.region.end))
        cells[op.destination][box] += 1
        assert any(r.intersect(op.region) == op.region for r in source.regions(op.source))
    for rank in destination.mesh.ranks:
        expected = np.zeros(source.shape, np.int8)
        for region in destination.regions(rank):
            expected[tuple(map(slice, region.offset, region.end))] = 1
        assert (cells[rank] == expected).all()
    check_balance(plan)


def least_largest_load(amounts: dict[tuple[int, ...], int]) -> float:
    """The LP: split each amount over its holders, minimise the largest load."""
    pairs = [(h, r) for h in amounts for r in h]
    ranks = sorted({r for _, r in pairs})
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1
    equal = np.array([[float(h == other) for h, _ in pairs] + [0.0] for other in amounts])
    upper = np.array([[float(r == rank) for _, r in pairs] + [-1.0] for rank in ranks])
    solved = linprog(
        cost, A_ub=upper, b_ub=np.zeros(len(ranks)), A_eq=equal, b_eq=list(amounts.values())
    )
    assert solved.success
    return float(solved.fun)


def check_balance(plan: TransferPlan) -> None:
    """Within 1 % of the bound, which the LP oracle confirms elsewhere."""
    largest = max(plan.sent_bytes.values(), default=0)
    slack = max(16, 0.01 * plan.bounds.max_sent_bytes)
    assert plan.bounds.max_sent_bytes <= largest + 1
    assert largest <= plan.bounds.max_sent_bytes + slack


holder_sets = st.sets(st.integers(0, 7), min_size=1, max_size=5).map(lambda s: tuple(sorted(s)))


@given(st.dictionaries(holder_sets, st.integers(1, 10_000), min_size=1, max_size=8))
def test_the_busiest_sender_is_least_busy(amounts: dict[tuple[int, ...], int]) -> None:
    shares, bound = balance(amounts)
    loads: Counter[int] = Counter()
    for holders, by_rank in shares.items():
        assert set(by_rank) <= set(holders)
        assert sum(by_rank.values()) == amounts[holders]
        loads.update(by_rank)
    least = least_largest_load(amounts)
    assert least <= max(loads.values()) + 1e-6
    assert max(loads.values()) <= least + 1
    assert float(bound) <= least + 1e-6


@given(cases(disjoint=True))
def test_the_plan_is_balanced_by_the_lp_and_never_worse_than_simple_rules(case: Case) -> None:
    plan = make_plan(*both(case))
    amounts: Counter[tuple[int, ...]] = Counter()
    first: Counter[int] = Counter()
    turn: Counter[int] = Counter()
    for name, (source, destination) in case.items():
        del name
        owners: dict[int, list[int]] = defaultdict(list)
        for rank in source.mesh.ranks:
            for number in enumerate_shard(source, rank).reshape(-1).tolist():
                owners[number].append(rank)
        wanted = chain.from_iterable(
            enumerate_shard(destination, r).reshape(-1).tolist() for r in destination.mesh.ranks
        )
        for i, number in enumerate(wanted):
            holders = tuple(sorted(owners[number]))
            amounts[holders] += 4
            first[holders[0]] += 4
            turn[holders[i % len(holders)]] += 4
    if not amounts:
        return
    largest = max(plan.sent_bytes.values(), default=0)
    # An element is the smallest unit: the LP may cut finer than four bytes, in each set of holders.
    unit = 4 * len(amounts)
    assert largest <= 1.01 * least_largest_load(amounts) + unit
    assert largest <= max(first.values()) + unit
    assert largest <= max(turn.values()) + unit


def test_the_lp_oracle_can_fail() -> None:
    amounts = {(0, 1): 100, (0,): 100}
    assert least_largest_load(amounts) == pytest.approx(100)
    first_holder = 200
    assert first_holder > 1.01 * least_largest_load(amounts)
    assert balance(amounts)[1] == Fraction(100)


def test_the_cover_oracle_can_fail() -> None:
    case = {"w": (_cut(2, 0), _cut(2, 1, first=2))}
    plan = make_plan(*both(case))
    lost = TransferPlan(plan.classes, plan.ops[1:], plan.bounds, ())
    with pytest.raises(AssertionError):
        assert_covers(lost, case)
    doubled = TransferPlan(plan.classes, plan.ops + plan.ops[:1], plan.bounds, ())
    assert doubled.redundancy > 1.0
    with pytest.raises(AssertionError):
        assert_covers(doubled, case)


def _cut(parts: int, dim: int, *, first: int = 0) -> Sharding:
    return Sharding(Mesh((parts,), tuple(range(first, first + parts))), (Shard(dim),), (8, 8))


def test_picture_one_rows_over_two_to_columns_over_four() -> None:
    """Each of four column holders gets a 4 x 2 tile from each of two row holders."""
    plan = make_plan(*both({"w": (_cut(2, 0), _cut(4, 1, first=2))}))
    tiles = {(op.source, op.destination): op.region for op in plan.ops}
    assert tiles == {
        (source, 2 + column): Region((4 * source, 2 * column), (4, 2))
        for source in range(2)
        for column in range(4)
    }
    assert set(plan.received_bytes.values()) == {2 * 4 * 2 * 4}
    assert set(plan.sent_bytes.values()) == {4 * 4 * 2 * 4}


def test_picture_two_four_column_shards_to_four_full_copies() -> None:
    """Each of four ranks receives the whole tensor, a 8 x 2 tile from each column holder."""
    whole = Sharding(Mesh((4,), (4, 5, 6, 7)), (Replicate(),), (8, 8))
    plan = make_plan(*both({"w": (_cut(4, 1), whole)}))
    tiles = {(op.source, op.destination): op.region for op in plan.ops}
    assert tiles == {(s, 4 + d): Region((0, 2 * s), (8, 2)) for s in range(4) for d in range(4)}
    assert set(plan.received_bytes.values()) == {8 * 8 * 4}


def test_layers_that_lie_alike_are_planned_once() -> None:
    case = {f"layers.{i}.w": (_cut(2, 0), _cut(4, 1, first=2)) for i in range(100)}
    plan = make_plan(*both(case))
    assert len(plan.classes) == 1
    assert len(plan.ops) == 8
    assert len(plan.for_rank(GroupRank(0)).sends[GroupRank(2)]) == 100


def test_replicas_share_the_sending_evenly() -> None:
    """HSDP: two replicas of two shards; every trainer rank sends the same."""
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    source = Sharding(mesh, (Replicate(), Shard(0)), (8, 8))
    plan = make_plan(*both({"w": (source, _cut(2, 1, first=4))}))
    assert set(plan.sent_bytes.values()) == {8 * 8 * 4 // 4}


def test_golden_digest() -> None:
    """The digest is compared between processes of one run; a change of format changes it."""
    plan = make_plan(*both({"w": (_cut(2, 0), _cut(4, 1, first=2))}))
    assert plan.digest == GOLDEN


GOLDEN = "a02dd4e9fa34903b151b67fa6304e3e757319ea01c14d02ce7fc8d6f98deea94"


def layout(rank: int, *tensors: TensorLayout) -> RankLayout:
    return RankLayout(GroupRank(rank), tensors)


def tensor(name: str, shape: tuple[int, ...], dtype: str, *regions: Region) -> TensorLayout:
    return TensorLayout(FQN(name), shape, parse_dtype(dtype), regions)


ROW = Region((0, 0), (1, 4))
ALL = Region((0, 0), (2, 4))


def test_all_mismatches_are_listed_together() -> None:
    sources = [
        layout(
            0,
            tensor("a", (2, 4), "float32", ALL),
            tensor("b", (2, 4), "int64", ALL),
            tensor("d", (2, 4), "float32", ALL),
            tensor("extra", (2, 4), "float32", ALL),
        )
    ]
    destinations = [
        layout(
            1,
            tensor("a", (4, 4), "float32", ALL),
            tensor("b", (2, 4), "bfloat16", ALL),
            tensor("c", (2, 4), "float32", ALL),
            tensor("d", (2, 4), "bfloat16", ALL),
        )
    ]
    with pytest.raises(PlanError) as caught:
        make_plan(sources, destinations)
    assert caught.value.faults == (
        "a: shape (2, 4) at the source, (4, 4) at the destination",
        "b: int64 at the source cannot be cast to bfloat16",
        "c: needed by the destination, held by no source rank",
    )


def test_an_unused_source_is_listed_not_refused() -> None:
    sources = [layout(0, tensor("a", (2, 4), "float32", ALL), tensor("x", (2, 4), "float32", ALL))]
    plan = make_plan(sources, [layout(1, tensor("a", (2, 4), "float32", ALL))])
    assert plan.unused_sources == ("x",)


def test_elements_that_nobody_holds_are_named() -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(
            [layout(0, tensor("a", (2, 4), "float32", ROW))],
            [layout(1, tensor("a", (2, 4), "float32", ALL))],
        )
    assert caught.value.faults == (
        "a: [1:2, 0:4] is needed by destination rank 1 and held by no source rank",
    )


def test_elements_asked_for_twice_are_named() -> None:
    with pytest.raises(PlanError, match="destination rank 1 asks for 4 elements twice in"):
        make_plan(
            [layout(0, tensor("a", (2, 4), "float32", ALL))],
            [layout(1, tensor("a", (2, 4), "float32", ALL, ROW))],
        )


def test_ranks_that_disagree_on_a_shape_are_named() -> None:
    with pytest.raises(PlanError, match=r"source ranks disagree on the shape: \(2, 4\) on rank 0"):
        make_plan(
            [
                layout(0, tensor("a", (2, 4), "float32", ROW)),
                layout(1, tensor("a", (3, 4), "float32", ROW)),
            ],
            [layout(2, tensor("a", (2, 4), "float32", ROW))],
        )


def test_ranks_that_disagree_on_a_dtype_are_named() -> None:
    with pytest.raises(PlanError, match="source ranks disagree on the dtype: bfloat16, float32"):
        make_plan(
            [
                layout(0, tensor("a", (2, 4), "float32", ROW)),
                layout(1, tensor("a", (2, 4), "bfloat16", ROW)),
            ],
            [layout(2, tensor("a", (2, 4), "float32", ROW))],
        )


def test_a_bucket_smaller_than_an_element() -> None:
    plan = make_plan(
        [layout(0, tensor("a", (2, 4), "float32", ALL))],
        [layout(1, tensor("a", (2, 4), "float32", ALL))],
    )
    with pytest.raises(PlanError, match="a bucket of 2 bytes holds no float32"):
        split_into_buckets(plan.for_rank(GroupRank(0)).sends[GroupRank(1)], 2)


def test_one_name_in_two_wire_dtypes() -> None:
    """A bf16 parameter and an fp32 one may be fed by the same checkpoint tensor."""
    plan = make_plan(
        layouts([("w", _cut(2, 0), "float32")]),
        [
            layout(
                2,
                tensor("w", (8, 8), "bfloat16", Region((0, 0), (8, 8))),
                tensor("w", (8, 8), "float32", Region((0, 0), (2, 8))),
            )
        ],
    )
    assert plan.received_bytes == {2: 8 * 8 * 2 + 2 * 8 * 4}
