"""From "element i of this view is element i of that one" to boxes of the canonical tensor.

A loader says `destination_view.copy_(source_view)`: the source is some view of the contiguous
canonical tensor (narrowed, transposed, split, flattened, stepped), the destination a view of a
parameter. `align` turns that into boxes of the canonical tensor with the destination's strides dim
by dim, few of them, enumerating only what no box can say. `align_elements` does the same for data
movement that no view can say (cat, clone, index), from an array of element numbers.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from reshard.errors import LayoutError
from reshard.layout.region import Region
from reshard.layout.view import StridedView

Aligned = tuple[Region, StridedView]


def align(
    shape: tuple[int, ...], source: StridedView, destination: StridedView
) -> tuple[Aligned, ...]:
    """Boxes of the canonical tensor, each with the destination view that corresponds to it.

    Args:
        shape: of the canonical tensor, which is contiguous.
        source: a view of it.
        destination: a view of local storage, of the same shape as `source`.

    Returns:
        (canonical region, destination view of the region's shape), disjoint on the destination.

    A transposed copy is one box with swapped strides:

    >>> align((2, 3), StridedView(0, (3, 2), (1, 3)), StridedView(0, (3, 2), (2, 1)))
    ((Region(offset=(0, 0), shape=(2, 3)), StridedView(offset=0, shape=(2, 3), stride=(1, 2))),)

    Raises:
        LayoutError: shapes differ, the source leaves the tensor, or the destination is broadcast.
    """
    if source.shape != destination.shape:
        raise LayoutError(f"source view {source.shape}, destination view {destination.shape}")
    if not prod(source.shape):
        return ()
    dims = _coalesce(source, destination)
    if any(d == 0 for _, _, d in dims):
        raise LayoutError(f"destination view {destination} writes one element several times")
    steps = StridedView.contiguous(shape).stride
    boxed, loose = _assign(shape, steps, dims, source.offset)
    aligned: list[Aligned] = []
    for start, begin in _walk(source.offset, destination.offset, loose):
        if _fits(shape, steps, boxed, start):
            aligned.append(_box(shape, steps, boxed, start, begin))
            continue
        # The enumeration moved this box across a dim's end: its elements go one by one.
        singles = [(n, steps[dim], step) for dim, (n, step) in boxed.items()]
        aligned += [_box(shape, steps, {}, s, d) for s, d in _walk(start, begin, singles)]
    return tuple(aligned)


_Dim = tuple[int, int, int]
"""Extent, source stride, destination stride."""

_Shape = tuple[_Dim, ...]


def _coalesce(source: StridedView, destination: StridedView) -> list[_Dim]:
    """Drop dims of extent 1 and merge dims that both views walk as one; outermost first."""
    dims = sorted(
        (
            dim
            for dim in zip(source.shape, source.stride, destination.stride, strict=True)
            if dim[0] > 1
        ),
        key=lambda dim: (-dim[1], -dim[2]),
    )
    merged: list[_Dim] = []
    for n, s, d in dims:
        if merged and merged[-1][1] == n * s and merged[-1][2] == n * d:
            merged[-1] = (merged[-1][0] * n, s, d)
        else:
            merged.append((n, s, d))
    return merged


def _assign(
    shape: tuple[int, ...], steps: tuple[int, ...], dims: list[_Dim], start: int
) -> tuple[dict[int, tuple[int, int]], list[_Dim]]:
    """Give each view dim a canonical dim to be a box extent of; the rest are enumerated.

    Returns:
        canonical dim -> (extent, destination stride); and the dims to enumerate.
    """
    boxed: dict[int, tuple[int, int]] = {}
    loose: list[_Dim] = []
    queue = list(reversed(dims))
    while queue:
        n, s, d = queue.pop()
        at = next((k for k in range(len(shape)) if steps[k] == s and shape[k] > 1), None)
        if s == 0 or at is None or at in boxed:
            loose.append((n, s, d))
            continue
        room = shape[at] - (start // steps[at]) % shape[at]
        if n <= room:
            boxed[at] = (n, d)
        elif room == shape[at] and n % shape[at] == 0:
            # The view walks several canonical dims as one: split off the innermost.
            boxed[at] = (shape[at], d)
            queue.append((n // shape[at], s * shape[at], d * shape[at]))
        else:
            loose.append((n, s, d))
    return boxed, loose


def _walk(start: int, begin: int, dims: Iterable[_Dim]) -> Iterator[tuple[int, int]]:
    """Source and destination element of every position of `dims`."""
    dims = tuple(dims)
    for at in product(*(range(n) for n, _, _ in dims)):
        yield (
            start + sum(i * s for i, (_, s, _) in zip(at, dims, strict=True)),
            begin + sum(i * d for i, (_, _, d) in zip(at, dims, strict=True)),
        )


def _fits(
    shape: tuple[int, ...], steps: tuple[int, ...], boxed: dict[int, tuple[int, int]], start: int
) -> bool:
    return all((start // steps[k]) % shape[k] + n <= shape[k] for k, (n, _) in boxed.items())


def _box(
    shape: tuple[int, ...],
    steps: tuple[int, ...],
    boxed: dict[int, tuple[int, int]],
    start: int,
    begin: int,
) -> Aligned:
    if not 0 <= start < prod(shape):
        raise LayoutError(f"the source view leaves the tensor of {shape} at element {start}")
    offset = tuple((start // step) % n for n, step in zip(shape, steps, strict=True))
    extent = tuple(boxed.get(k, (1, 0))[0] for k in range(len(shape)))
    strides = [0] * len(shape)
    step = 1
    for k in reversed(range(len(shape))):
        # Extent-1 dims get a contiguous view's stride: equal meaning, equal value.
        strides[k] = boxed[k][1] if k in boxed else step
        step = strides[k] * extent[k]
    return Region(offset, extent), StridedView(begin, extent, tuple(strides))


def align_elements(
    shape: tuple[int, ...], elements: npt.NDArray[np.int64], destination: StridedView
) -> tuple[Aligned, ...]:
    """Boxes from element numbers: place `i` holds canonical element `elements[i]`.

    Args:
        shape: of the canonical tensor.
        elements: flat canonical element number of each place, of `destination.shape`; negative
            where the place holds none.
        destination: the view of local storage whose places are meant.

    Places that follow each other at a constant step become runs; equal runs at a constant distance
    become planes, and so on, so that a permutation of blocks costs a box a block.
    """
    numbers = np.ascontiguousarray(elements, dtype=np.int64).reshape(-1)
    if numbers.size != prod(destination.shape):
        raise LayoutError(f"{numbers.size} elements for a view of {destination.shape}")
    places = _places(destination)
    aligned: list[Aligned] = []
    for source, local in _runs(numbers, places):
        aligned += align(shape, source, local)
    return tuple(aligned)


def _places(view: StridedView) -> npt.NDArray[np.int64]:
    """Storage element of each place of a view, row-major."""
    places = np.array(view.offset, dtype=np.int64)
    for n, step in zip(view.shape, view.stride, strict=True):
        places = places[..., None] + np.arange(n, dtype=np.int64) * step
    return places.reshape(-1)


def _runs(
    numbers: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
) -> list[tuple[StridedView, StridedView]]:
    """Pairs of equally shaped views (canonical, local) that cover all non-negative numbers."""
    held = numbers >= 0
    numbers, places = numbers[held], places[held]
    if not numbers.size:
        return []
    # Level 0: single elements. Each level joins neighbours at a constant distance.
    shape_ids = np.zeros(numbers.size, dtype=np.int64)
    known: dict[_Shape, int] = {(): 0}
    table: list[_Shape] = [()]
    while True:
        joined = _join_once(numbers, places, shape_ids, known, table)
        if joined is None:
            break
        numbers, places, shape_ids = joined
    pairs = []
    for number, place, shape_id in zip(numbers, places, shape_ids, strict=True):
        dims = table[shape_id]
        extent = tuple(n for n, _, _ in dims)
        pairs.append(
            (
                StridedView(int(number), extent, tuple(s for _, s, _ in dims)),
                StridedView(int(place), extent, tuple(d for _, _, d in dims)),
            )
        )
    return pairs


_Triple = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _join_once(
    numbers: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    shape_ids: npt.NDArray[np.int64],
    known: dict[_Shape, int],
    table: list[_Shape],
) -> _Triple | None:
    """Join neighbours of equal shape at equal distances; None if nothing joins."""
    if numbers.size < 2:
        return None
    source_step, local_step = np.diff(numbers), np.diff(places)
    alike = shape_ids[1:] == shape_ids[:-1]
    starts, lengths = [], []
    at = 0
    change = np.ones(source_step.size, dtype=bool)
    change[1:] = (source_step[1:] != source_step[:-1]) | (local_step[1:] != local_step[:-1])
    # Boundaries of maximal stretches of constant steps, over which elements are alike.
    edges = np.flatnonzero(change | ~alike)
    limit = np.append(edges, source_step.size)
    while at < numbers.size:
        if at == numbers.size - 1 or not alike[at]:
            starts.append(at)
            lengths.append(1)
            at += 1
            continue
        upto = int(limit[np.searchsorted(limit, at, side="right")])
        starts.append(at)
        lengths.append(upto - at + 1)
        at = upto + 1
    if len(starts) == numbers.size:
        return None
    new_ids = []
    for start, length in zip(starts, lengths, strict=True):
        dims = table[shape_ids[start]]
        if length > 1:
            step = (length, int(source_step[start]), int(local_step[start]))
            dims = (step, *dims)
        if dims not in known:
            known[dims] = len(table)
            table.append(dims)
        new_ids.append(known[dims])
    index = np.array(starts)
    return numbers[index], places[index], np.array(new_ids, dtype=np.int64)
