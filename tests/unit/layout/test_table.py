"""Piece tables: every local place of a region, and what a rank holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.layout.strategies import boxes, elements

from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard.layout.pieces import Piece
from reshard.layout.region import Region
from reshard.layout.table import PieceTable
from reshard.layout.view import StridedView

W = FQN("w")

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)

Place = tuple[str, int, int]
"""Storage, storage element, canonical element."""


def places(shape: tuple[int, ...], piece: Piece) -> list[Place]:
    numbers = elements(shape, piece.region.offset, piece.region.shape)
    local = [piece.view.offset]
    for n, step in zip(piece.view.shape, piece.view.stride, strict=True):
        local = [at + i * step for at in local for i in range(n)]
    return [(piece.storage, at, number) for at, number in zip(local, numbers, strict=True)]


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...], storage: str) -> Piece:
    """A box in a storage of its own, row-major or column-major, from any offset."""
    region = draw(boxes(shape))
    view = StridedView.contiguous(region.shape, draw(st.integers(0, 5)))
    if draw(st.booleans()):
        swapped = StridedView.contiguous(tuple(reversed(region.shape)), view.offset)
        view = StridedView(view.offset, region.shape, tuple(reversed(swapped.stride)))
    return Piece(region, storage, view)


@given(shapes, st.data())
def test_cut_returns_every_place_of_a_region(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    held = [data.draw(pieces(shape, f"s{i}")) for i in range(count)]
    table = PieceTable({W: held})
    wanted = data.draw(boxes(shape))
    asked = set(elements(shape, wanted.offset, wanted.shape))
    available = {number for piece in held for _, _, number in places(shape, piece)}
    if not asked <= available:
        with pytest.raises(LayoutError, match="lies only in part on this rank"):
            table.cut(W, wanted)
        return
    found = [place for piece in table.cut(W, wanted) for place in places(shape, piece)]
    expected = [place for piece in held for place in places(shape, piece) if place[2] in asked]
    assert sorted(found) == sorted(expected)


@given(shapes, st.data())
def test_regions_are_the_union_of_the_pieces(shape: tuple[int, ...], data: st.DataObject) -> None:
    held = data.draw(st.lists(pieces(shape, "s"), max_size=6))
    regions = PieceTable({W: held}).regions(W)
    found = [i for r in regions for i in elements(shape, r.offset, r.shape)]
    expected = {i for piece in held for _, _, i in places(shape, piece)}
    assert sorted(found) == sorted(expected)


def test_a_tied_tensor_has_two_places() -> None:
    whole = Region((0, 0), (4, 2))
    table = PieceTable({W: [Piece(whole, name, StridedView.contiguous((4, 2))) for name in "ab"]})
    assert table.regions(W) == (whole,)
    assert [(p.storage, p.view.offset) for p in table.cut(W, Region((1, 0), (2, 2)))] == [
        ("a", 2),
        ("b", 2),
    ]


def test_names_and_pieces() -> None:
    empty = Piece(Region((0,), (0,)), "s", StridedView(0, (0,), (1,)))
    table = PieceTable({FQN("b"): [empty], FQN("a"): []})
    assert table.names == ("a", "b")
    assert table.pieces(FQN("b")) == ()
    assert table.regions(FQN("b")) == ()
    assert table.cut(FQN("b"), Region((0,), (0,))) == ()
    assert FQN("a") in table
    assert FQN("c") not in table


@pytest.mark.parametrize("ask", [PieceTable.pieces, PieceTable.regions])
def test_an_unknown_tensor_is_named(ask: object) -> None:
    with pytest.raises(LayoutError, match="v: no such tensor on this rank"):
        ask(PieceTable({W: []}), FQN("v"))  # type: ignore[operator]
    with pytest.raises(LayoutError, match="v: no such tensor on this rank"):
        PieceTable({W: []}).cut(FQN("v"), Region((0,), (1,)))


def test_a_gap_is_named() -> None:
    table = PieceTable({W: [Piece(Region((0, 0), (2, 4)), "s", StridedView.contiguous((2, 4)))]})
    with pytest.raises(LayoutError) as caught:
        table.cut(W, Region((1, 0), (3, 4)))
    assert str(caught.value) == (
        "w: [1:4, 0:4] lies only in part on this rank: [2:4, 0:4] is missing"
    )


def test_a_piece_is_a_region_and_a_view_of_one_shape() -> None:
    with pytest.raises(LayoutError, match=r"is held by a view of shape \(4,\)"):
        Piece(Region((0, 0), (2, 2)), "s", StridedView.contiguous((4,)))
    whole = Piece(Region((4,), (4,)), "s", StridedView.contiguous((4,)))
    with pytest.raises(LayoutError, match=r"\[2:6\] is not inside \[4:8\]"):
        whole.narrow(Region((2,), (4,)))
