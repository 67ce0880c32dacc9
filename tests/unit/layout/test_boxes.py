"""Sets of boxes against sets of element numbers."""

from collections import Counter
from collections.abc import Iterable
from math import prod

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.layout.strategies import boxes, elements

from reshard.layout.boxes import (
    BoxIndex,
    flat_boxes,
    merge,
    missing,
    partition,
    subtract,
    union,
)
from reshard.layout.region import Region

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


def numbers(shape: tuple[int, ...], regions: Iterable[Region]) -> list[int]:
    return sorted(i for r in regions for i in elements(shape, r.offset, r.shape))


@given(shapes, st.data())
def test_union_is_set_union_and_disjoint(shape: tuple[int, ...], data: st.DataObject) -> None:
    some = data.draw(st.lists(boxes(shape), max_size=8))
    together = union(some)
    assert numbers(shape, together) == sorted(set(numbers(shape, some)))
    assert list(together) == sorted(together)


@given(shapes, st.data())
def test_each_cell_of_a_partition_lies_in_the_same_regions(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    some = data.draw(st.lists(boxes(shape), max_size=6))
    cells = partition(some)
    members = {i: who for cell, who in cells for i in numbers(shape, [cell])}
    assert sum(cell.volume for cell, _ in cells) == len(members)
    for i in range(prod(shape)):
        holding = tuple(k for k, box in enumerate(some) if i in numbers(shape, [box]))
        assert members.get(i, ()) == holding


@given(shapes, st.data())
def test_subtract_is_set_difference(shape: tuple[int, ...], data: st.DataObject) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    difference = set(numbers(shape, [a])) - set(numbers(shape, [b]))
    assert numbers(shape, subtract(a, b)) == sorted(difference)


@given(shapes, st.data())
def test_missing_is_what_no_part_holds(shape: tuple[int, ...], data: st.DataObject) -> None:
    region, parts = data.draw(boxes(shape)), data.draw(st.lists(boxes(shape), max_size=5))
    difference = set(numbers(shape, [region])) - set(numbers(shape, parts))
    assert numbers(shape, missing(region, parts)) == sorted(difference)


@given(shapes, st.data())
def test_intersect_is_set_intersection(shape: tuple[int, ...], data: st.DataObject) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = a.intersect(b)
    both = set(numbers(shape, [a])) & set(numbers(shape, [b]))
    assert numbers(shape, [common] if common else []) == sorted(both)


@given(shapes, st.data())
def test_merge_keeps_every_element_as_often(shape: tuple[int, ...], data: st.DataObject) -> None:
    some = data.draw(st.lists(boxes(shape), max_size=8))
    merged = merge(box for box in some if box.volume)
    assert Counter(numbers(shape, merged)) == Counter(numbers(shape, some))


@given(shapes, st.data())
def test_the_index_finds_what_meets_a_region(shape: tuple[int, ...], data: st.DataObject) -> None:
    some = data.draw(st.lists(boxes(shape), max_size=8))
    region = data.draw(boxes(shape))
    expected = [
        (i, common) for i, box in enumerate(some) if (common := box.intersect(region)) is not None
    ]
    assert BoxIndex(some).meeting(region) == expected


@given(shapes, st.data())
def test_flat_boxes_are_an_interval_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    length = data.draw(st.integers(0, prod(shape) - start))
    found = flat_boxes(shape, start, length)
    in_order = [i for box in found for i in elements(shape, box.offset, box.shape)]
    assert in_order == list(range(start, start + length))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_neighbouring_experts_merge_to_one_box() -> None:
    experts = [Region((e, 0, 0), (1, 8, 4)) for e in range(16)]
    assert union(experts) == (Region((0, 0, 0), (16, 8, 4)),)


def test_a_grid_merges_to_one_box() -> None:
    tiles = [Region((r, c), (2, 3)) for r in range(0, 40, 2) for c in range(0, 60, 3)]
    assert union(reversed(tiles)) == (Region((0, 0), (40, 60)),)


def test_columns_are_found_by_bisection_among_long_boxes() -> None:
    columns = [Region((0, c), (4096, 1)) for c in range(2000)]
    index = BoxIndex([Region((0, 0), (4096, 2000)), *columns])
    assert [i for i, _ in index.meeting(Region((7, 500), (1, 3)))] == [0, 501, 502, 503]


def test_thousands_of_overlapping_boxes_are_cut_once() -> None:
    rows = [Region((r, 0), (2, 8)) for r in range(3000)]
    cells = partition(rows)
    assert len(cells) == 3001
    assert union(rows) == (Region((0, 0), (3001, 8)),)


def test_regions_read_as_slices() -> None:
    assert str(Region((0, 2), (4, 4))) == "[0:4, 2:6]"
    assert str(Region((), ())) == "[]"
