"""Layouts that no plan can join: one error that lists every fault."""

import pytest

from reshard.dtypes import parse_dtype
from reshard.errors import LayoutError, PlanError
from reshard.ids import FQN, GroupRank
from reshard.layout.holding import RankLayout, TensorLayout
from reshard.layout.region import Region
from reshard.layout.side import SideLayout, TensorGroup
from reshard.plan import make_plan

ROW = Region((0, 0), (1, 4))
ALL = Region((0, 0), (2, 4))


def layout(rank: int, *tensors: TensorLayout) -> RankLayout:
    return RankLayout(GroupRank(rank), tensors)


def tensor(name: str, shape: tuple[int, ...], dtype: str, *regions: Region) -> TensorLayout:
    return TensorLayout(FQN(name), shape, parse_dtype(dtype), regions)


def faults(sources: list[RankLayout], destinations: list[RankLayout]) -> tuple[str, ...]:
    with pytest.raises(
        PlanError, match="no plan can join the source and the destination"
    ) as caught:
        make_plan(sources, destinations)
    return caught.value.faults


def test_faults_of_all_kinds_are_listed_together() -> None:
    sources = [
        layout(
            0,
            tensor("a", (2, 4), "float32", ALL),
            tensor("b", (2, 4), "int64", ALL),
            tensor("d", (2, 4), "float32", ALL),
            tensor("e", (2, 4), "float32", ROW),
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
            tensor("e", (2, 4), "float32", ALL),
        )
    ]
    assert faults(sources, destinations) == (
        "a: shape (2, 4) at the source, (4, 4) at the destination",
        "b: int64 at the source cannot be cast to bfloat16",
        "c: needed by the destination, held by no source rank",
        "e: destination rank 1 asks for [1:2, 0:4], which no source rank holds",
    )


def test_a_hole_names_all_tensors_and_ranks_that_have_it() -> None:
    names = ("layers.0.w", "layers.1.w", "layers.2.w")
    sources = [layout(0, *(tensor(name, (2, 4), "float32", ROW) for name in names))]
    needs = [tensor(name, (2, 4), "float32", ALL) for name in names]
    assert faults(sources, [layout(1, *needs), layout(2, *needs)]) == (
        "layers.0.w (and 2 alike): destination ranks 1, 2 ask for [1:2, 0:4], which no source rank "
        "holds",
    )


def test_a_hole_of_many_regions_is_shown_in_part() -> None:
    even = [Region((i,), (1,)) for i in range(0, 40, 2)]
    sources = [layout(0, tensor("w", (40,), "float32", *even))]
    (fault,) = faults(sources, [layout(1, tensor("w", (40,), "float32", Region((0,), (40,))))])
    assert fault.endswith("[13:14], [15:16] and 12 regions more, which no source rank holds")


def test_elements_asked_for_twice() -> None:
    assert faults(
        [layout(0, tensor("a", (2, 4), "float32", ALL))],
        [layout(1, tensor("a", (2, 4), "float32", ALL, ROW))],
    ) == ("a: destination rank 1 asks for 4 elements twice in [0:2, 0:4], [0:1, 0:4]",)


def test_ranks_that_disagree_on_a_shape() -> None:
    assert faults(
        [
            layout(0, tensor("a", (2, 4), "float32", ROW)),
            layout(1, tensor("a", (3, 4), "float32", ROW)),
            layout(2, tensor("a", (3, 4), "float32", ROW)),
        ],
        [layout(3, tensor("a", (2, 4), "float32", ROW))],
    ) == ("source: a: ranks disagree on the shape: (2, 4) on rank 0, (3, 4) on ranks 1, 2",)


def test_source_ranks_that_disagree_on_a_dtype() -> None:
    assert faults(
        [
            layout(0, tensor("a", (2, 4), "float32", ROW)),
            layout(1, tensor("a", (2, 4), "bfloat16", ROW)),
        ],
        [layout(2, tensor("a", (2, 4), "float32", ROW))],
    ) == ("a: source ranks disagree on the dtype: bfloat16, float32",)


def test_a_rank_that_reports_twice() -> None:
    assert faults(
        [layout(0, tensor("a", (2, 4), "float32", ALL))] * 2,
        [layout(2, tensor("a", (2, 4), "float32", ROW))],
    ) == ("source: a: rank 0 reports it twice",)


def test_regions_outside_the_tensor() -> None:
    outside, flat = Region((1, 0), (2, 4)), Region((0,), (8,))
    assert faults(
        [layout(0, tensor("a", (2, 4), "float32", outside, flat))],
        [layout(1, tensor("a", (2, 4), "float32", ALL))],
    ) == ("source: a of shape (2, 4) has no regions [1:3, 0:4] on rank 0, [0:8] on rank 0",)


def test_a_side_that_describes_a_tensor_twice() -> None:
    by_rank = ((GroupRank(0), (ALL,)),), ((GroupRank(1), (ROW,)),)
    groups = tuple(TensorGroup((FQN("a"),), (2, 4), "float32", held) for held in by_rank)
    with pytest.raises(PlanError, match="a: the source describes it twice"):
        make_plan(SideLayout(groups), [layout(2, tensor("a", (2, 4), "float32", ROW))])


def test_reports_that_do_not_fit_together() -> None:
    with pytest.raises(LayoutError, match="the ranks' layouts do not fit together") as caught:
        SideLayout.from_ranks([layout(0, tensor("a", (2, 4), "float32", ALL))] * 2)
    assert caught.value.faults == ("a: rank 0 reports it twice",)
