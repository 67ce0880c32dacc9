"""Piece tables and unions of boxes, against sets of elements."""

from collections.abc import Iterable
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.layout.strategies import elements

from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard.layout.boxes import subtract, union
from reshard.layout.pieces import Piece
from reshard.layout.region import Region
from reshard.layout.table import PieceTable
from reshard.layout.view import StridedView

W = FQN("w")


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(draw(st.integers(0, n - o)) for o, n in zip(offset, shape, strict=True))
    return Region(offset, extent)


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


def numbers(shape: tuple[int, ...], regions: Iterable[Region]) -> list[int]:
    return sorted(i for r in regions for i in elements(shape, r.offset, r.shape))


@given(shapes, st.data())
def test_union_is_set_union_and_disjoint(shape: tuple[int, ...], data: st.DataObject) -> None:
    given_boxes = data.draw(st.lists(boxes(shape), max_size=8))
    assert numbers(shape, union(given_boxes)) == sorted(set(numbers(shape, given_boxes)))


@given(shapes, st.data())
def test_subtract_is_set_difference(shape: tuple[int, ...], data: st.DataObject) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    assert numbers(shape, subtract(a, b)) == sorted(
        set(numbers(shape, [a])) - set(numbers(shape, [b]))
    )


@given(shapes, st.data())
def test_intersect_is_set_intersection(shape: tuple[int, ...], data: st.DataObject) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = a.intersect(b)
    both = set(numbers(shape, [a])) & set(numbers(shape, [b]))
    assert numbers(shape, [common] if common else []) == sorted(both)


@given(shapes, st.data())
def test_cut_returns_every_place_of_a_region(shape: tuple[int, ...], data: st.DataObject) -> None:
    held = data.draw(st.lists(boxes(shape), min_size=1, max_size=6))
    pieces = [Piece(r, f"s{i}", StridedView.contiguous(r.shape)) for i, r in enumerate(held)]
    table = PieceTable({W: pieces})
    wanted = data.draw(boxes(shape))
    available = set(numbers(shape, held))
    asked = set(numbers(shape, [wanted]))
    if not asked <= available:
        with pytest.raises(LayoutError, match="lies only in part on this rank"):
            table.cut(W, wanted)
        return
    found = table.cut(W, wanted)
    places = sorted(
        (piece.storage, number) for piece in found for number in numbers(shape, [piece.region])
    )
    expected = sorted(
        (f"s{i}", number)
        for i, r in enumerate(held)
        for number in numbers(shape, [r])
        if number in asked
    )
    assert places == expected


def test_neighbouring_experts_merge_to_one_box() -> None:
    experts = [Region((e, 0, 0), (1, 8, 4)) for e in range(16)]
    assert union(experts) == (Region((0, 0, 0), (16, 8, 4)),)


def test_an_unknown_tensor_is_named() -> None:
    with pytest.raises(LayoutError, match="v: no such tensor on this rank"):
        PieceTable({W: []}).cut(FQN("v"), Region((0,), (1,)))


def test_thousands_of_pieces_are_found_by_bisection() -> None:
    rows = [Piece(Region((r, 0), (1, 4)), "s", StridedView.contiguous((1, 4), 4 * r))
            for r in range(5000)]  # fmt: skip
    table = PieceTable({W: rows})
    assert len(table.cut(W, Region((2500, 0), (3, 4)))) == 3
    assert prod(table.regions(W)[0].shape) == 20000
