"""Layouts as they travel: nothing is lost, and what repeats is sent once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.plan.worlds import Case, both, cases, cut, sides

from reshard.errors import LayoutError, WireError
from reshard.ids import FQN, GroupRank
from reshard.joining import merge_layouts, plan_from
from reshard.layout.compact import CompactSide, expand
from reshard.layout.names import NamePattern, pack_names, pack_numbers, unpack_names, unpack_numbers
from reshard.layout.region import Region
from reshard.layout.sharding import Mesh, Shard, Sharding
from reshard.layout.side import SideLayout
from reshard.plan import make_plan
from reshard.wire import decode, encode

names = st.text("01239ab._-", max_size=12) | st.builds(
    "layers.{}.experts.{}.w{}".format, st.integers(0, 12), st.integers(0, 12), st.integers(0, 2)
)


@given(st.sets(names, max_size=40))
def test_names_come_back(given_names: set[str]) -> None:
    patterns = pack_names(map(FQN, given_names))
    assert unpack_names(patterns) == tuple(sorted(given_names))
    assert sum(pattern.count for pattern in patterns) == len(given_names)


def test_layers_and_experts_are_one_pattern() -> None:
    packed = pack_names(FQN(f"layers.{i}.experts.{e}.w") for i in range(3, 61) for e in range(256))
    assert packed == (NamePattern(("layers.", ".experts.", ".w"), ((3, 58), (0, 256))),)


def test_a_number_with_leading_zeros_is_text() -> None:
    packed = pack_names([FQN("shard.007.w"), FQN("shard.07.w"), FQN("shard.7.w")])
    assert unpack_names(packed) == ("shard.007.w", "shard.07.w", "shard.7.w")


@given(st.sets(st.integers(0, 50)))
def test_numbers_come_back(numbers: set[int]) -> None:
    assert unpack_numbers(pack_numbers(sorted(numbers))) == tuple(sorted(numbers))


@given(cases())
def test_reports_and_sides_come_back(case: Case) -> None:
    for reports, side in zip(both(case), sides(case), strict=True):
        sent = [decode(encode(CompactSide.of_rank(report)), CompactSide) for report in reports]
        gathered = expand(sent)
        assert gathered.side == side == SideLayout.from_ranks(reports)
        assert gathered.faults == {}
        whole = decode(encode(CompactSide.of_side(side)), CompactSide)
        assert expand([whole]).side == side


@given(cases())
def test_the_plan_from_merged_layouts_is_the_plan_from_reports(case: Case) -> None:
    sources, destinations = both(case)
    merged = merge_layouts(
        [CompactSide.of_rank(report) for report in sources],
        [CompactSide.of_rank(report) for report in destinations],
    )
    assert plan_from(merged).digest == make_plan(sources, destinations).digest


def test_faults_travel_with_the_layouts() -> None:
    held, other = cut(2, 0), Sharding(Mesh((1,), (2,)), (Shard(0),), (9, 9))
    sources = [
        SideLayout.from_shardings([([FQN("w")], sharding, "float32")]) for sharding in (held, other)
    ]
    merged = merge_layouts(map(CompactSide.of_side, sources), [])
    with pytest.raises(Exception, match="source: w: ranks disagree on the shape") as caught:
        plan_from(merged)
    assert "(8, 8) on ranks 0, 1, (9, 9) on rank 2" in str(caught.value)


def test_ranks_that_hold_the_same_layers_are_sent_as_few_bytes() -> None:
    every = [FQN(f"layers.{i}.w") for i in range(1000)]
    mesh = Mesh((64,), tuple(range(64)))
    replicas = SideLayout.from_shardings([(every, Sharding(mesh, (Shard(0),), (64, 8)), "float32")])
    assert len(encode(CompactSide.of_rank(replicas.for_rank(GroupRank(3))))) < 150
    assert len(encode(CompactSide.of_side(replicas))) < 1500


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"texts": ["a"], "numbers": [[0, 2]]}, "do not go round"),
        ({"texts": ["a", "b"], "numbers": [[0, 2, 3]]}, "malformed runs"),
        ({"texts": ["a", "b"], "numbers": [[0, -2]]}, "malformed runs"),
    ],
)
def test_a_malformed_pattern(message: dict[str, object], text: str) -> None:
    with pytest.raises(WireError, match=text):
        decode(encode(message), NamePattern)


def test_too_many_names() -> None:
    with pytest.raises(LayoutError, match="1099511627776 tensor names are over the limit"):
        unpack_names([NamePattern(("a", "b", "c"), ((0, 1 << 20), (0, 1 << 20)))])


def test_a_malformed_region() -> None:
    side = CompactSide.of_side(SideLayout.from_shardings([([FQN("w")], cut(1, 0), "float32")]))
    (group,) = side.groups
    odd = CompactSide((type(group)(group.names, (8, 8), "float32", (((((0, 0, 1),)), (0, 1)),)),))
    with pytest.raises(LayoutError, match="a region of 3 numbers"):
        expand([odd])


def test_a_region_keeps_its_place() -> None:
    side = SideLayout.from_shardings([([FQN("w")], cut(2, 1), "float32")])
    (group,) = expand([CompactSide.of_side(side)]).side.groups
    assert dict(group.by_rank)[GroupRank(1)] == (Region((0, 4), (8, 4)),)
