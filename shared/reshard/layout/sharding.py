"""Shardings: which regions of a global tensor each rank of a mesh holds.

The one home of the chunk rule and of the order in which mesh axes cut a tensor. Coordinate space:
global regions, group ranks. The rules are those of torch's DTensor (`torch.chunk` along a dim,
axes applied left to right) and, for `FlatShard`, of FSDP1 and ZeRO.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from reshard.errors import LayoutError
from reshard.layout.boxes import flat_boxes
from reshard.layout.mesh import Mesh
from reshard.layout.pieces import Piece
from reshard.layout.placements import FlatShard, Placement, Replicate, Shard, StridedShard
from reshard.layout.region import Region
from reshard.layout.view import StridedView

__all__ = [
    "FlatShard",
    "Mesh",
    "Placement",
    "Replicate",
    "Shard",
    "Sharding",
    "StridedShard",
    "chunk",
]

Interval = tuple[int, int]
"""Start and length, in elements of one dim."""


def chunk(length: int, parts: int, at: int) -> Interval:
    """The `at`-th of `parts` pieces of `length` elements, as `torch.chunk` (and DTensor) cuts.

    >>> [chunk(10, 4, i) for i in range(4)]
    [(0, 3), (3, 3), (6, 3), (9, 1)]
    >>> [chunk(2, 4, i) for i in range(4)]
    [(0, 1), (1, 1), (2, 0), (2, 0)]
    """
    step = -(-length // parts) if length else 0
    start = min(at * step, length)
    return start, min(step, length - start)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor of `shape` lies on a mesh.

    Attributes:
        mesh: the ranks.
        placements: one for each mesh axis, applied left to right.
        shape: of the whole tensor, in elements.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        faults = []
        if len(self.placements) != len(self.mesh.shape):
            faults.append(
                f"{len(self.placements)} placements for a mesh of {len(self.mesh.shape)} axes"
            )
        for placement in self.placements:
            faults += _placement_faults(placement, self.shape)
        flat = sum(isinstance(p, FlatShard) for p in self.placements)
        cut = sum(isinstance(p, Shard | StridedShard) for p in self.placements)
        if flat > 1 or (flat and cut):
            faults.append("a flat shard cannot be combined with another shard")
        if faults:
            raise LayoutError(f"not a sharding of {self.shape}", faults)

    def regions(self, rank: int) -> tuple[Region, ...]:
        """The regions that `rank` holds, in the order in which its local shard holds them.

        >>> mesh = Mesh((2, 2), (0, 1, 2, 3))
        >>> fsdp_over_tp = Sharding(mesh, (StridedShard(0, 2), Shard(0)), (8, 4))
        >>> [region.offset[0] for region in map(lambda r: fsdp_over_tp.regions(r)[0], range(4))]
        [0, 4, 2, 6]

        Raises:
            LayoutError: `rank` is not in the mesh.
        """
        at = self.mesh.coordinate(rank)
        for placement, parts, i in zip(self.placements, self.mesh.shape, at, strict=True):
            if isinstance(placement, FlatShard):
                return flat_boxes(self.shape, *chunk(prod(self.shape), parts, i))
        intervals = [self._intervals(dim, at) for dim in range(len(self.shape))]
        return _boxes(intervals)

    def in_cut_order(self) -> "Sharding":
        """The same sharding with its axes in the order in which FSDP2 really cuts.

        FSDP2 cuts after tensor parallelism, whatever the order of the mesh axes; a strided shard
        says so from left to right. On even sizes, both readings hold the same elements. On some
        uneven ones they do not: of 7 rows on 3 (FSDP) x 2 (TP) ranks, FSDP2 gives row 6 to the
        last rank, where DTensor's rules for its placements give it to the last but one. Weights
        that FSDP2 made are where it put them, so describe those by this.

        >>> mesh = Mesh((3, 2), (0, 1, 2, 3, 4, 5))
        >>> by_rule = Sharding(mesh, (StridedShard(0, 2), Shard(0)), (7,))
        >>> by_rule.regions(5), by_rule.in_cut_order().regions(5)
        ((), (Region(offset=(6,), shape=(1,)),))
        """
        order: list[int] = []
        for axis, placement in reversed(tuple(enumerate(self.placements))):
            after = 0
            if isinstance(placement, StridedShard):
                after = self._cuts_before(axis, placement, order)
            order.insert(after, axis)
        placements = tuple(self.placements[axis] for axis in order)
        return Sharding(
            self.mesh.transposed(tuple(order)),
            tuple(Shard(p.dim) if isinstance(p, StridedShard) else p for p in placements),
            self.shape,
        )

    def _cuts_before(self, axis: int, placement: StridedShard, later: Sequence[int]) -> int:
        """How many of the axes to the right cut before a strided one: they make its split factor.

        Raises:
            LayoutError: no axes to the right multiply to the split factor.
        """
        factor = 1
        for count, other in enumerate(later):
            if factor == placement.split_factor:
                return count
            cut = self.placements[other]
            if isinstance(cut, Shard | StridedShard) and cut.dim == placement.dim:
                factor *= self.mesh.shape[other]
        if factor == placement.split_factor:
            return len(later)
        raise LayoutError(
            f"placement {placement} on axis {self.mesh.axes[axis]} was not made by cutting after "
            f"other axes: those to its right cut dim {placement.dim} into {factor} parts"
        )

    def pieces(self, rank: int, storage: str) -> tuple[Piece, ...]:
        """The regions of `rank`, as views of its contiguous local shard, stored under `storage`."""
        if any(isinstance(p, FlatShard) for p in self.placements):
            return self._flat_pieces(rank, storage)
        at = self.mesh.coordinate(rank)
        intervals = [self._intervals(dim, at) for dim in range(len(self.shape))]
        local = StridedView.contiguous(tuple(sum(n for _, n in dim) for dim in intervals))
        return tuple(
            Piece(region, storage, _subview(local, start, region.shape))
            for region, start in zip(_boxes(intervals), _starts(intervals), strict=True)
        )

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local shard of `rank`; `(n,)` for a flat shard."""
        at = self.mesh.coordinate(rank)
        if any(isinstance(p, FlatShard) for p in self.placements):
            return (sum(region.volume for region in self.regions(rank)),)
        return tuple(sum(n for _, n in self._intervals(dim, at)) for dim in range(len(self.shape)))

    def _flat_pieces(self, rank: int, storage: str) -> tuple[Piece, ...]:
        pieces, start = [], 0
        for region in self.regions(rank):
            pieces.append(Piece(region, storage, StridedView.contiguous(region.shape, start)))
            start += region.volume
        return tuple(pieces)

    def _intervals(self, dim: int, at: tuple[int, ...]) -> list[Interval]:
        """What the mesh position `at` holds of one dim: sorted as the local shard has them."""
        held = [(0, self.shape[dim])] if self.shape[dim] else []
        for placement, parts, i in zip(self.placements, self.mesh.shape, at, strict=True):
            match placement:
                case Shard(d) if d == dim:
                    held = _take(held, *chunk(sum(n for _, n in held), parts, i))
                case StridedShard(d, split_factor) if d == dim:
                    held = _strided(held, split_factor, parts, i)
                case _:
                    pass
        return held


def _placement_faults(placement: Placement, shape: tuple[int, ...]) -> list[str]:
    match placement:
        case Shard(dim) | StridedShard(dim, _) if not 0 <= dim < len(shape):
            return [f"placement {placement} shards dim {dim} of a {len(shape)}-d tensor"]
        case StridedShard(_, split_factor) if split_factor < 1:
            return [f"placement {placement} has split factor {split_factor}"]
        case Replicate() | Shard() | StridedShard() | FlatShard():
            return []
        case _:
            return [f"placement {placement!r} is none of Replicate, Shard, StridedShard, FlatShard"]


def _take(held: Sequence[Interval], start: int, length: int) -> list[Interval]:
    """The part `[start, start + length)` of the concatenation of `held`."""
    taken, passed = [], 0
    for offset, extent in held:
        low, high = max(start, passed), min(start + length, passed + extent)
        if low < high:
            taken.append((offset + low - passed, high - low))
        passed += extent
    return taken


def _strided(held: Sequence[Interval], split_factor: int, parts: int, at: int) -> list[Interval]:
    """Cut `held` into `split_factor` chunks, then take the `at`-th part of each chunk."""
    length = sum(n for _, n in held)
    taken: list[Interval] = []
    for factor in range(split_factor):
        start, extent = chunk(length, split_factor, factor)
        low, size = chunk(extent, parts, at)
        taken += _take(held, start + low, size)
    return _joined(taken)


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    """Neighbours that touch become one interval."""
    joined: list[Interval] = []
    for start, length in intervals:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _boxes(intervals: Sequence[Sequence[Interval]]) -> tuple[Region, ...]:
    """The cross product of the intervals of each dim, row-major."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for dim in intervals:
        boxes = [((*o, start), (*s, n)) for o, s in boxes for start, n in dim]
    return tuple(Region(offset, shape) for offset, shape in boxes)


def _starts(intervals: Sequence[Sequence[Interval]]) -> list[tuple[int, ...]]:
    """Where each box of `_boxes` begins in the local shard."""
    starts: list[tuple[int, ...]] = [()]
    for dim in intervals:
        local, passed = [], 0
        for _, n in dim:
            local.append(passed)
            passed += n
        starts = [(*start, at) for start in starts for at in local]
    return starts


def _subview(local: StridedView, start: tuple[int, ...], shape: tuple[int, ...]) -> StridedView:
    offset = sum(i * step for i, step in zip(start, local.stride, strict=True))
    return StridedView(local.offset + offset, shape, local.stride)
