"""A rank's pieces, and the question that packing asks: where does this region lie?

Coordinate space: regions are global, views are local. One table serves a trainer rank (what it
holds) or an engine rank (where it wants things); in the latter one region may have several places.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from math import prod

from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard.layout.pieces import Piece
from reshard.layout.region import Region


class PieceTable:
    """All pieces of one rank, by canonical name."""

    def __init__(self, pieces: Mapping[FQN, Iterable[Piece]]) -> None:
        self._tensors = {name: _Tensor(tuple(held)) for name, held in pieces.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    @property
    def names(self) -> tuple[FQN, ...]:
        """Canonical names, sorted."""
        return tuple(sorted(self._tensors))

    def pieces(self, name: FQN) -> tuple[Piece, ...]:
        """The pieces of one tensor, sorted by region."""
        return self._tensors[name].pieces

    def regions(self, name: FQN) -> tuple[Region, ...]:
        """Disjoint boxes that together are all that the pieces hold, merged to few."""
        return union(piece.region for piece in self.pieces(name))

    def cut(self, name: FQN, region: Region) -> tuple[Piece, ...]:
        """Every local place of `region`.

        Raises:
            LayoutError: the tensor is unknown, or part of the region lies nowhere.
        """
        if name not in self._tensors:
            raise LayoutError(f"{name}: no such tensor on this rank")
        found = self._tensors[name].overlapping(region)
        covered = union(piece.region for piece in found)
        if sum(box.volume for box in covered) != region.volume:
            raise LayoutError(f"{name}: {region} lies only in part on this rank: {covered}")
        return found


class _Tensor:
    """The pieces of one tensor, found by the first offset."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        self.pieces = tuple(sorted(piece for piece in pieces if piece.region.volume))
        self._starts = [piece.region.offset[:1] for piece in self.pieces]
        self._longest = max((p.region.shape[0] for p in self.pieces if p.region.ndim), default=0)

    def overlapping(self, region: Region) -> tuple[Piece, ...]:
        found = []
        low, high = 0, len(self.pieces)
        if region.ndim:
            low = bisect_left(self._starts, (max(0, region.offset[0] - self._longest),))
            high = bisect_left(self._starts, (region.end[0],))
        for piece in self.pieces[low:high]:
            common = piece.region.intersect(region)
            if common is not None:
                found.append(piece if common == piece.region else piece.narrow(common))
        return tuple(found)


def union(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Disjoint boxes that together are the given ones, which may overlap; sorted, few.

    >>> union([Region((0,), (4,)), Region((2,), (4,)), Region((8,), (1,))])
    (Region(offset=(0,), shape=(6,)), Region(offset=(8,), shape=(1,)))
    """
    boxes = sorted({region for region in regions if region.volume})
    if not boxes or not boxes[0].ndim:
        return tuple(boxes[:1])
    return tuple(sorted(_merge(_disjoint(boxes))))


def _disjoint(boxes: list[Region]) -> list[Region]:
    """Cut away what earlier boxes already hold; `boxes` is sorted."""
    kept: list[Region] = []
    open_from = 0
    for box in boxes:
        while open_from < len(kept) and kept[open_from].end[0] <= box.offset[0]:
            open_from += 1
        rest = [box]
        for held in kept[open_from:]:
            rest = [part for box_part in rest for part in subtract(box_part, held)]
        kept += rest
        if len(rest) != 1 or rest[0] != box:
            kept.sort()
            open_from = 0
    return kept


def subtract(region: Region, other: Region) -> tuple[Region, ...]:
    """The elements of `region` that are not in `other`, as disjoint boxes.

    >>> subtract(Region((0, 0), (2, 4)), Region((0, 1), (1, 2)))
    (Region(offset=(1, 0), shape=(1, 4)), Region(offset=(0, 0), shape=(1, 1)), \
Region(offset=(0, 3), shape=(1, 1)))
    """
    common = region.intersect(other)
    if common is None:
        return (region,)
    parts: list[Region] = []
    offset, shape = list(region.offset), list(region.shape)
    for dim in range(region.ndim):
        low, high = common.offset[dim], common.end[dim]
        for start, stop in ((offset[dim], low), (high, offset[dim] + shape[dim])):
            if start < stop:
                parts.append(
                    Region(
                        (*offset[:dim], start, *offset[dim + 1 :]),
                        (*shape[:dim], stop - start, *shape[dim + 1 :]),
                    )
                )
        offset[dim], shape[dim] = low, high - low
    return tuple(parts)


def _merge(boxes: list[Region]) -> list[Region]:
    """Join boxes that differ in one dim and touch there, last dim first."""
    ndim = boxes[0].ndim
    for dim in reversed(range(ndim)):
        boxes = _merge_along(boxes, dim)
    return boxes


def _merge_along(boxes: list[Region], dim: int) -> list[Region]:
    def others(box: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (
            box.offset[:dim] + box.offset[dim + 1 :],
            box.shape[:dim] + box.shape[dim + 1 :],
        )

    merged: list[Region] = []
    for box in sorted(boxes, key=lambda box: (others(box), box.offset[dim])):
        last = merged[-1] if merged else None
        if last is not None and others(last) == others(box) and last.end[dim] == box.offset[dim]:
            shape = list(last.shape)
            shape[dim] += box.shape[dim]
            merged[-1] = Region(last.offset, tuple(shape))
        else:
            merged.append(box)
    return merged


def volume(regions: Iterable[Region]) -> int:
    """Elements in disjoint regions."""
    return sum(prod(region.shape) for region in regions)
