"""From "element i of this view is element i of that one" to boxes of the canonical tensor.

A loader says `destination_view.copy_(source_view)`: the source is some view of the contiguous
canonical tensor (narrowed, transposed, split, flattened, stepped), the destination a view of a
parameter. `align` turns that into boxes of the canonical tensor with the destination's strides dim
by dim, few of them, enumerating only what no box can say. Movement that no view can say (cat,
clone, index) is the subject of `elements`.
"""

from collections.abc import Iterator, Sequence
from math import prod

from reshard.errors import LayoutError
from reshard.layout.region import Region
from reshard.layout.view import StridedView

Aligned = tuple[Region, StridedView]
"""A canonical region, and the local view of the same shape that corresponds to it."""


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
    walk = _coalesce(source, destination)
    if any(dim.local_step == 0 for dim in walk):
        raise LayoutError(f"destination view {destination} writes one element several times")
    low = source.offset + sum(min(0, dim.end) for dim in walk)
    high = source.offset + sum(max(0, dim.end) for dim in walk)
    if low < 0 or high >= prod(shape):
        raise LayoutError(
            f"source view {source} reaches elements {low} to {high} of a tensor of {shape}, which "
            f"has {prod(shape)}"
        )
    return tuple(_Canonical(shape).boxes(source.offset, destination.offset, walk))


class _Dim(tuple[int, int, int]):
    """One dim that both views walk together: (extent, canonical step, local step)."""

    __slots__ = ()

    def __new__(cls, extent: int, step: int, local_step: int) -> "_Dim":
        return super().__new__(cls, (extent, step, local_step))

    @property
    def extent(self) -> int:
        return self[0]

    @property
    def step(self) -> int:
        return self[1]

    @property
    def local_step(self) -> int:
        return self[2]

    @property
    def end(self) -> int:
        """From the first to the last canonical element."""
        return (self.extent - 1) * self.step

    def with_extent(self, extent: int) -> "_Dim":
        return _Dim(extent, self.step, self.local_step)

    def split(self, inner: int) -> "tuple[_Dim, _Dim]":
        """The same walk as two dims, the inner one of extent `inner`, which divides."""
        outer = _Dim(self.extent // inner, self.step * inner, self.local_step * inner)
        return outer, self.with_extent(inner)


def _coalesce(source: StridedView, destination: StridedView) -> list[_Dim]:
    """Drop dims of extent 1 and merge dims that both views walk as one; outermost first."""
    walk = [
        _Dim(*dim)
        for dim in zip(source.shape, source.stride, destination.stride, strict=True)
        if dim[0] > 1
    ]
    walk.sort(key=lambda dim: (-dim.step, -dim.local_step))
    merged: list[_Dim] = []
    for dim in walk:
        outer = merged[-1] if merged else None
        if (
            outer is not None
            and outer.step == dim.extent * dim.step
            and outer.local_step == dim.extent * dim.local_step
        ):
            merged[-1] = dim.with_extent(outer.extent * dim.extent)
        else:
            merged.append(dim)
    return merged


class _Canonical:
    """The contiguous tensor whose boxes are sought."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._steps = StridedView.contiguous(shape).stride
        self._dim_of_step = {step: k for k, step in enumerate(self._steps) if shape[k] > 1}

    def boxes(self, start: int, local_start: int, walk: Sequence[_Dim]) -> Iterator[Aligned]:
        """The boxes of the elements that `walk` reaches from `start`, one after the other.

        Each dim of the walk becomes the extent of a canonical dim. One that steps over elements, or
        meets a canonical dim that is taken, is enumerated; one that leaves its canonical dim at the
        end is cut there.
        """
        extents: dict[int, _Dim] = {}
        todo = list(walk)
        while todo:
            dim = todo.pop()
            k = self._dim_of_step.get(dim.step)
            if k is None or k in extents:
                yield from self._each(start, local_start, dim, (*extents.values(), *todo))
                return
            at = (start // self._steps[k]) % self._shape[k]
            if at + dim.extent <= self._shape[k]:
                extents[k] = dim
            elif at == 0 and dim.extent % self._shape[k] == 0:
                outer, inner = dim.split(self._shape[k])
                extents[k] = inner
                todo.append(outer)
            else:
                room = self._shape[k] - at if at else dim.extent // self._shape[k] * self._shape[k]
                yield from self._cut(start, local_start, dim, room, (*extents.values(), *todo))
                return
        yield self._box(start, local_start, extents)

    def _each(
        self, start: int, local_start: int, dim: _Dim, others: Sequence[_Dim]
    ) -> Iterator[Aligned]:
        """One position of `dim` after the other."""
        for i in range(dim.extent):
            yield from self.boxes(start + i * dim.step, local_start + i * dim.local_step, others)

    def _cut(
        self, start: int, local_start: int, dim: _Dim, first: int, others: Sequence[_Dim]
    ) -> Iterator[Aligned]:
        """The first positions of `dim`, then the rest."""
        yield from self.boxes(start, local_start, (*others, dim.with_extent(first)))
        start, local_start = start + first * dim.step, local_start + first * dim.local_step
        yield from self.boxes(start, local_start, (*others, dim.with_extent(dim.extent - first)))

    def _box(self, start: int, local_start: int, extents: dict[int, _Dim]) -> Aligned:
        offset = tuple(
            (start // step) % n for n, step in zip(self._shape, self._steps, strict=True)
        )
        shape = tuple(extents[k].extent if k in extents else 1 for k in range(len(self._shape)))
        stride = [0] * len(shape)
        step = 1
        for k in reversed(range(len(shape))):
            # Dims of extent 1 get a contiguous view's stride: equal meaning, equal value.
            stride[k] = extents[k].local_step if k in extents and shape[k] > 1 else step
            step = stride[k] * shape[k]
        return Region(offset, shape), StridedView(local_start, shape, tuple(stride))
