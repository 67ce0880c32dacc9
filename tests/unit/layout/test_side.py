"""Whole sides: from reports or from shardings, the same value."""

from hypothesis import given
from tests.unit.plan.worlds import Case, both, cases, cut, sides

from reshard.ids import FQN, GroupRank
from reshard.layout.region import Region
from reshard.layout.side import SideLayout, TensorGroup


@given(cases())
def test_reports_and_shardings_say_the_same(case: Case) -> None:
    for reports, side in zip(both(case), sides(case), strict=True):
        assert SideLayout.from_ranks(reports) == side
        again = [side.for_rank(report.rank) for report in reports]
        assert SideLayout.from_ranks(again).groups == tuple(g for g in side.groups if g.by_rank)


def test_equal_meaning_is_an_equal_value() -> None:
    names = (FQN("b"), FQN("a"))
    together = SideLayout.from_shardings([(names, cut(2, 0), "float32")])
    apart = SideLayout.from_shardings([((name,), cut(2, 0), "float32") for name in names])
    assert together == apart
    assert together.groups[0].names == ("a", "b")


def test_empty_regions_and_ranks_are_left_out() -> None:
    empty, row = Region((0, 0), (0, 4)), Region((0, 0), (1, 4))
    held = ((GroupRank(3), (empty,)), (GroupRank(1), (row, empty)))
    group = TensorGroup((FQN("w"),), (2, 4), "float32", held)
    assert group.by_rank == ((1, (row,)),)
