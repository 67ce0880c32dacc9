"""From element numbers to boxes: for data movement that no strided view can say.

A loader that concatenates, clones or indexes is replayed on element numbers; what arrives in a
parameter is an array of canonical element numbers. `align_elements` finds the strided structure in
it again. numpy, because such an array has as many numbers as the parameter has elements.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from reshard.errors import LayoutError
from reshard.layout.align.views import Aligned, align
from reshard.layout.view import StridedView

_Numbers = npt.NDArray[np.int64]


def align_elements(
    shape: tuple[int, ...], elements: _Numbers, destination: StridedView
) -> tuple[Aligned, ...]:
    """Boxes from element numbers: place `i` holds canonical element `elements[i]`.

    Args:
        shape: of the canonical tensor.
        elements: flat canonical element number of each place, `destination.shape` in row-major
            order; negative where the place holds none.
        destination: the view of local storage whose places are meant.

    Places that follow each other at a constant distance become runs; equal runs at a constant
    distance become planes, and so on, so that a permutation of blocks costs a box a block.

    >>> swapped_halves = np.array([[4, 5], [6, 7], [0, 1], [2, 3]])
    >>> for region, view in align_elements((4, 2), swapped_halves, StridedView.contiguous((4, 2))):
    ...     print(region, view.offset)
    [2:4, 0:2] 0
    [0:2, 0:2] 4

    Raises:
        LayoutError: not as many elements as places, or a number outside the tensor.
    """
    numbers = np.ascontiguousarray(elements, dtype=np.int64).reshape(-1)
    if numbers.size != prod(destination.shape):
        raise LayoutError(f"{numbers.size} elements for a view of {destination.shape}")
    held = numbers >= 0
    runs = _Runs.single(numbers[held], _places(destination)[held])
    row = shape[-1] if shape else 1
    while (joined := runs.joined(row)) is not None:
        runs = joined
    return tuple(box for source, local in runs.views() for box in align(shape, source, local))


def _places(view: StridedView) -> _Numbers:
    """Storage element of each place of a view, row-major."""
    places = np.array(view.offset, dtype=np.int64)
    for n, step in zip(view.shape, view.stride, strict=True):
        places = places[..., None] + np.arange(n, dtype=np.int64) * step
    return places.reshape(-1)


_Shape = tuple[tuple[int, int, int], ...]
"""(extent, canonical step, local step) of each dim, outermost first."""


@dataclass(frozen=True, slots=True)
class _Runs:
    """Equal-length columns: where each run starts on both sides, and what shape it has.

    Attributes:
        numbers: first canonical element of each run.
        places: first local element of each run.
        kinds: index of each run's shape.
        shapes: the shapes that occur.
    """

    numbers: _Numbers
    places: _Numbers
    kinds: _Numbers
    shapes: list[_Shape]

    @classmethod
    def single(cls, numbers: _Numbers, places: _Numbers) -> "_Runs":
        """Every element is a run of its own."""
        return cls(numbers, places, np.zeros(numbers.size, dtype=np.int64), [()])

    def views(self) -> Iterator[tuple[StridedView, StridedView]]:
        """Canonical and local view of each run."""
        columns = (self.numbers.tolist(), self.places.tolist(), self.kinds.tolist())
        for number, place, kind in zip(*columns, strict=True):
            dims = self.shapes[kind]
            extent = tuple(n for n, _, _ in dims)
            yield (
                StridedView(number, extent, tuple(step for _, step, _ in dims)),
                StridedView(place, extent, tuple(step for _, _, step in dims)),
            )

    def joined(self, row: int) -> "_Runs | None":
        """Neighbours of equal shape at equal distances become one run; None if there are none.

        Args:
            row: extent of the canonical tensor's last dim, in elements. What follows on from the
                end of one row to the next would hide that rows are alike, and is joined later.
        """
        if self.numbers.size < 2:
            return None
        steps, local_steps = np.diff(self.numbers), np.diff(self.places)
        alike = self.kinds[1:] == self.kinds[:-1]
        if row > 1:
            alike &= (steps != 1) | (self.numbers[1:] % row != 0)
        first, last = _stretches(steps, local_steps, alike)
        if not first.size:
            return None
        lengths = np.ones(self.numbers.size, dtype=np.int64)
        lengths[first] = last - first + 1
        heads = np.flatnonzero(~_inside(first, last, self.numbers.size))
        # The step of a run of one counts for nothing: zero, so that equal shapes look equal.
        long = lengths[heads] > 1
        columns = (
            self.kinds[heads],
            lengths[heads],
            np.where(long, np.append(steps, 0)[heads], 0),
            np.where(long, np.append(local_steps, 0)[heads], 0),
        )
        kinds, rows = _distinct(columns)
        shapes = [
            ((n, step, local), *self.shapes[kind]) if n > 1 else self.shapes[kind]
            for kind, n, step, local in rows
        ]
        return _Runs(self.numbers[heads], self.places[heads], kinds, shapes)


def _stretches(
    steps: _Numbers, local_steps: _Numbers, alike: npt.NDArray[np.bool_]
) -> tuple[_Numbers, _Numbers]:
    """First and last element of the stretches at constant steps, taken greedily from the left.

    An element belongs to one stretch: where two meet, the left one has it, and of two neighbouring
    gaps of length one only one can be bridged.
    """
    change = np.ones(steps.size, dtype=bool)
    change[1:] = (
        (steps[1:] != steps[:-1]) | (local_steps[1:] != local_steps[:-1]) | ~alike[1:] | ~alike[:-1]
    )
    begin = np.flatnonzero(change)
    length = np.diff(np.append(begin, steps.size))
    # Whether a group of equal steps is bridged: never between unlike runs, always if it is long;
    # a lone step, if the group before it was not.
    fixed = ~alike[begin] | (length > 1)
    order = np.arange(begin.size)
    anchor = np.maximum.accumulate(np.where(fixed, order, -1))
    anchored = np.where(anchor >= 0, alike[begin][anchor], False)
    bridged = anchored ^ ((order - anchor) % 2 == 1)
    taken = np.zeros(begin.size, dtype=np.int64)
    taken[1:] = bridged[:-1]
    first, last = (begin + taken)[bridged], (begin + length)[bridged]
    return first, last


def _inside(first: _Numbers, last: _Numbers, size: int) -> npt.NDArray[np.bool_]:
    """Which elements follow another one in their stretch."""
    edges = np.zeros(size + 1, dtype=np.int8)
    edges[first + 1] += 1
    edges[last + 1] -= 1
    return np.cumsum(edges[:-1], dtype=np.int8).astype(bool)


def _distinct(
    columns: tuple[_Numbers, ...],
) -> tuple[_Numbers, list[tuple[int, ...]]]:
    """Number the distinct rows; returns each row's number, and the rows by number."""
    numbers = np.zeros(columns[0].size, dtype=np.int64)
    for column in columns:
        if column.min() != column.max():
            values, index = np.unique(column, return_inverse=True)
            _, numbers = np.unique(numbers * values.size + index, return_inverse=True)
    count = int(numbers.max()) + 1
    example = np.zeros(count, dtype=np.int64)
    example[numbers] = np.arange(numbers.size)
    rows = zip(*(column[example].tolist() for column in columns), strict=True)
    return numbers, list(rows)
