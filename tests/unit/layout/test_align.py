"""Alignment of views against element-by-element copies."""

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.layout.strategies import elements

from reshard.errors import LayoutError
from reshard.layout.align import align, align_elements
from reshard.layout.view import StridedView

nonempty = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def views_of(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of element numbers, seen through a random chain of views."""
    view = torch.arange(prod(shape)).view(shape)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["narrow", "transpose", "split", "step", "merge"]))
        if not view.ndim:
            break
        dim = draw(st.integers(0, view.ndim - 1))
        size = view.shape[dim]
        if kind == "narrow" and size:
            start = draw(st.integers(0, size - 1))
            view = view.narrow(dim, start, draw(st.integers(1, size - start)))
        elif kind == "transpose":
            view = view.transpose(dim, draw(st.integers(0, view.ndim - 1)))
        elif kind == "split" and size:
            part = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            view = view.view(*view.shape[:dim], part, -1, *view.shape[dim + 1 :])
        elif kind == "step" and size:
            view = view[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
        elif kind == "merge" and dim + 1 < view.ndim:
            try:
                view = view.view(*view.shape[:dim], -1, *view.shape[dim + 2 :])
            except RuntimeError:
                continue
    return view


def written(shape: tuple[int, ...], aligned: object, size: int) -> list[int]:
    """Which canonical element each storage place gets; -1 for none."""
    storage = torch.full((max(size, 1),), -1)
    for region, view in aligned:  # type: ignore[attr-defined]
        places = storage.as_strided(view.shape, view.stride, view.offset)
        assert (places == -1).all(), "a place is written twice"
        numbers = torch.tensor(elements(shape, region.offset, region.shape), dtype=torch.long)
        places.copy_(numbers.view(view.shape))
    return storage[:size].tolist()


@given(nonempty, st.data())
def test_align_moves_the_elements_that_copy_moves(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    source = data.draw(views_of(shape))
    order = data.draw(st.permutations(range(source.ndim)))
    storage = torch.full((source.numel(),), -1)
    destination = storage.view([source.shape[d] for d in order]).permute(
        [order.index(d) for d in range(source.ndim)]
    )
    destination.copy_(source)
    aligned = align(
        shape,
        StridedView(int(source.storage_offset()), tuple(source.shape), source.stride()),
        StridedView(0, tuple(destination.shape), destination.stride()),
    )
    assert written(shape, aligned, storage.numel()) == storage.tolist()


@given(nonempty, st.data())
def test_align_elements_moves_any_permutation(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = prod(shape)
    numbers = data.draw(st.permutations(range(count)))
    holes = data.draw(st.sets(st.integers(0, max(0, count - 1))))
    expected = [-1 if i in holes else n for i, n in enumerate(numbers)]
    aligned = align_elements(
        shape, np.array(expected, dtype=np.int64), StridedView.contiguous((count,))
    )
    assert written(shape, aligned, count) == expected


@pytest.mark.parametrize(
    ("shape", "source", "boxes"),
    [
        ((64, 32), lambda w: w[8:24], 1),
        ((64, 32), lambda w: w.t(), 1),
        ((64, 32), lambda w: w.view(4, 16, 32)[1], 1),
        ((64, 32), lambda w: w.view(4, 16, 32).transpose(0, 1), 4),
        ((4, 8, 16), lambda w: w.transpose(1, 2)[2], 1),
        ((64, 32), lambda w: w.reshape(-1), 1),
        ((64, 32), lambda w: w[::2], 32),
        ((64, 32), lambda w: w.reshape(-1)[5:1003], 3),
        ((64, 32), lambda w: w.reshape(-1)[5:20], 1),
        ((4, 8, 16), lambda w: w.reshape(-1)[3:500], 5),
        ((64, 1, 32), lambda w: w.view(64, 32).t(), 1),
        ((64, 32), lambda w: w.unflatten(0, (8, 8)).transpose(1, 2)[3], 1),
        ((), lambda w: w.view(1), 1),
        ((64, 0), lambda w: w.t(), 0),
        ((64,), lambda w: w.expand(3, 64), 3),
    ],
    ids=[
        "rows",
        "transposed",
        "group",
        "interleaved",
        "expert",
        "flat",
        "stepped",
        "ragged",
        "within a row",
        "ragged 3-d",
        "size-1 dim",
        "split",
        "scalar",
        "empty",
        "repeated",
    ],
)
def test_loaders_views_become_few_boxes(shape: tuple[int, ...], source: object, boxes: int) -> None:
    view = source(torch.empty(shape, device="meta"))  # type: ignore[operator]
    aligned = align(
        shape,
        StridedView(view.storage_offset(), tuple(view.shape), view.stride()),
        StridedView.contiguous(tuple(view.shape)),
    )
    assert len(aligned) == boxes


@pytest.mark.parametrize(
    ("arrange", "boxes"),
    [
        (lambda n: n, 1),
        (lambda n: n.T, 1),
        (lambda n: n[:, ::-1], 64),
        (lambda n: np.concatenate([n[100:120], n[:50], n[40:60]]), 3),
        (lambda n: np.concatenate([n[:, 0::2], n[:, 1::2]], axis=1), 32),
        (lambda n: n.reshape(128, 2, 32).transpose(0, 2, 1), 2),
        (lambda n: n.reshape(8, 2, 8, 64).transpose(0, 2, 1, 3), 2 * 8),
        (lambda n: np.where(n % 64 < 20, n, -1), 1),
        (lambda n: n.reshape(-1)[70:900], 3),
        (lambda n: np.full(7, -1), 0),
        (lambda n: n[:0], 0),
    ],
    ids=[
        "all",
        "transposed",
        "reversed",
        "cat of overlapping rows",
        "deinterleaved columns",
        "interleaved columns",
        "rope rows",
        "holes",
        "ragged",
        "nothing",
        "empty",
    ],
)
def test_structure_is_found_again_in_element_numbers(arrange: object, boxes: int) -> None:
    numbers = arrange(np.arange(128 * 64).reshape(128, 64))  # type: ignore[operator]
    destination = StridedView.contiguous(numbers.shape)
    aligned = align_elements((128, 64), numbers, destination)
    assert len(aligned) <= boxes
    assert written((128, 64), aligned, numbers.size) == numbers.reshape(-1).tolist()


def test_elements_go_to_a_strided_destination() -> None:
    """The places of the second column of a 4 x 3 storage."""
    numbers = np.array([3, 2, -1, 0])
    aligned = align_elements((4,), numbers, StridedView(1, (4,), (3,)))
    assert written((4,), aligned, 12) == [-1, 3, -1, -1, 2, -1, -1, -1, -1, -1, 0, -1]


def test_as_many_elements_as_places() -> None:
    with pytest.raises(LayoutError, match=r"3 elements for a view of \(4,\)"):
        align_elements((4,), np.arange(3), StridedView.contiguous((4,)))


def test_the_oracle_of_writes_can_fail() -> None:
    aligned = align((2, 3), StridedView.contiguous((2, 3)), StridedView.contiguous((2, 3)))
    with pytest.raises(AssertionError, match="a place is written twice"):
        written((2, 3), aligned + aligned, 6)
    transposed = align((2, 3), StridedView.contiguous((2, 3)), StridedView(0, (2, 3), (1, 2)))
    assert written((2, 3), transposed, 6) != list(range(6))


def test_shapes_must_agree() -> None:
    with pytest.raises(LayoutError, match=r"source view \(4,\), destination view \(2, 2\)"):
        align((4,), StridedView.contiguous((4,)), StridedView.contiguous((2, 2)))


def test_a_broadcast_destination_is_refused() -> None:
    with pytest.raises(LayoutError, match="writes one element several times"):
        align((4,), StridedView.contiguous((4,)), StridedView(0, (4,), (0,)))


def test_a_source_outside_the_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"reaches elements 6 to 7 of a tensor of \(4,\)"):
        align((4,), StridedView(6, (2,), (1,)), StridedView.contiguous((2,)))
