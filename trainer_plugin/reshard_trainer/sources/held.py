"""One of the trainer's tensors as a rank holds it, whatever wraps it.

Every kind of trainer comes down to this: a whole shape, a flat local storage, and which regions lie
where in it. Coordinate spaces: global regions, local views. Not here: names.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from reshard.errors import LayoutError
from reshard.layout.align import Aligned
from reshard.layout.boxes import flat_boxes
from reshard.layout.pieces import Piece
from reshard.layout.region import Region
from reshard.layout.view import StridedView
from reshard_trainer.dtensors import sharding_of
from reshard_trainer.ensemble import Ensemble


class Places(Protocol):
    """Where regions lie in a storage. A value: equal places have equal pieces."""

    def pieces(self) -> tuple[Aligned, ...]:
        """Each held region and its local view.

        Raises:
            LayoutError: the tensor lies in a way that is not understood.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A tensor as one rank holds it.

    Attributes:
        shape: of the whole tensor, in elements.
        flat: the whole local storage as 1-d, in elements of its dtype, without gradients.
        places: which regions of the tensor lie where in it.
    """

    shape: tuple[int, ...]
    flat: torch.Tensor
    places: Places

    @property
    def form(self) -> object:
        """All that the layout follows from; equal forms, equal pieces."""
        return (self.shape, self.flat.dtype, self.flat.device, self.places)

    def views(self) -> list[tuple[Region, torch.Tensor]]:
        """Each held region and its values."""
        return [
            (region, self.flat.as_strided(view.shape, view.stride, view.offset))
            for region, view in self.places.pieces()
        ]


@dataclass(frozen=True, slots=True)
class Boxes:
    """Places that were written down, box by box."""

    boxes: tuple[Aligned, ...]

    def pieces(self) -> tuple[Aligned, ...]:
        """Each box."""
        return self.boxes


@dataclass(frozen=True, slots=True)
class Shards:
    """A DTensor's local shard.

    Attributes:
        mesh, placements: as torch has them.
        shape: of the whole tensor, in elements.
        local: the shard in its storage.
        ensemble: the trainer's ranks.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    local: StridedView
    ensemble: Ensemble

    def pieces(self) -> tuple[Aligned, ...]:
        """The shard, cut where it is not one region of the tensor."""
        sharding = sharding_of(self.mesh, self.placements, self.shape, self.ensemble)
        if self.mesh.get_coordinate() is None:
            return ()
        expected = sharding.local_shape(self.ensemble.rank)
        if self.local.shape != expected:
            raise LayoutError(
                f"the local shard of {self.placements} is of shape {self.local.shape}, the layout "
                f"algebra says {expected}"
            )
        contiguous = sharding.pieces(self.ensemble.rank, "")
        return tuple((p.region, _restride(p, expected, self.local)) for p in contiguous)


def held_dtensor(tensor: DTensor, ensemble: Ensemble) -> Held:
    """A DTensor on any mesh, in any placement."""
    with torch.no_grad():
        local = tensor.to_local()
    shape = tuple(tensor.shape)
    placements = tuple(tensor.placements)
    shards = Shards(tensor.device_mesh, placements, shape, _view(local), ensemble)
    return Held(shape, flat_storage(local), shards)


def held_whole(tensor: torch.Tensor) -> Held:
    """A plain tensor: all of it is here."""
    shape = tuple(tensor.shape)
    return Held(shape, flat_storage(tensor), Boxes(((Region.whole(shape), _view(tensor)),)))


def held_part(tensor: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...]) -> Held:
    """A plain tensor that is one box of a larger one.

    Raises:
        LayoutError: the larger one has no such box.
    """
    region = Region(offset, tuple(tensor.shape))
    if len(shape) != region.ndim or any(e > n for e, n in zip(region.end, shape, strict=True)):
        raise LayoutError(f"a tensor of {shape} has no region {region}")
    return Held(shape, flat_storage(tensor), Boxes(((region, _view(tensor)),)))


def held_interval(
    flat: torch.Tensor, shape: tuple[int, ...], first: int, start: int, n: int
) -> Held:
    """Consecutive elements of a flattened tensor, lying one after the other.

    Args:
        flat: the local storage, 1-d and contiguous.
        shape: of the whole tensor, in elements.
        first: number of the first held element in the flattened tensor.
        start: where it lies in `flat`.
        n: how many are held.
    """
    boxes = []
    for region in flat_boxes(shape, first, n):
        boxes.append((region, StridedView.contiguous(region.shape, start)))
        start += region.volume
    return Held(shape, flat_storage(flat), Boxes(tuple(boxes)))


def packed(regions: Iterable[Region]) -> tuple[Boxes, int]:
    """Places for `regions` one after the other in a buffer, and how many elements it has.

    >>> packed([Region((0, 2), (1, 2)), Region((1, 0), (1, 4))])[1]
    6
    """
    boxes, start = [], 0
    for region in regions:
        boxes.append((region, StridedView.contiguous(region.shape, start)))
        start += region.volume
    return Boxes(tuple(boxes)), start


def flat_storage(local: torch.Tensor) -> torch.Tensor:
    """The whole storage under a local tensor, as 1-d, in elements of its dtype."""
    local = local.detach()
    elements = local.untyped_storage().nbytes() // local.element_size()
    return local.as_strided((elements,), (1,), 0)


def _view(local: torch.Tensor) -> StridedView:
    return StridedView(int(local.storage_offset()), tuple(local.shape), tuple(local.stride()))


def _restride(piece: Piece, shape: tuple[int, ...], local: StridedView) -> StridedView:
    """From a view of a contiguous local shard to one of the storage that really holds it."""
    rest, offset = piece.view.offset, local.offset
    dense = StridedView.contiguous(shape).stride
    for step, stride in zip(dense, local.stride, strict=True):
        position, rest = divmod(rest, step)
        offset += position * stride
    return StridedView(offset, piece.region.shape, local.stride)
