"""Where the elements of a move lie: views of local tensors, and copies between them.

Coordinate space: regions are global; each view has the shape of its region. A `CopyList` is built
once and run at every refit.
"""

from collections.abc import Callable, Sequence

import torch

from reshard.errors import ReshardError
from reshard.layout.region import Region
from reshard.plan import Move
from reshard.transport.casting import (
    CHUNK_ELEMENTS,
    SCRATCH_BYTES,
    cast_in_chunks,
    chunks,
    is_scattered,
)

Places = Sequence[tuple[Region, torch.Tensor]]
"""(global region, local view of the region's shape); together they hold a move's region."""

Locate = Callable[[Move], Places]
"""Where this rank reads, or writes, the elements of a move."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CopyList:
    """Copies that run together; an element that is cast travels through the wire dtype.

    Attributes:
        nbytes: of all destinations together.
        temporary_bytes: the largest temporary that `run` makes.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.temporary_bytes = 0
        # One multi-tensor call a pair of dtypes: CUDA's fast path wants them alike.
        self._alike: dict[
            tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]
        ] = {}
        self._scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rounded: list[tuple[torch.Tensor, torch.Tensor, torch.dtype]] = []

    def add(self, destination: torch.Tensor, source: torch.Tensor, wire: torch.dtype) -> None:
        """Copy `source` to `destination`, of the same shape, as if it travelled as `wire`."""
        if not destination.numel():
            return
        destination, source = destination.detach(), source.detach()
        self.nbytes += destination.numel() * destination.element_size()
        if wire not in (destination.dtype, source.dtype):
            self._rounded.append((destination, source, wire))
            elements = min(source.numel(), CHUNK_ELEMENTS)
            self.temporary_bytes = max(self.temporary_bytes, elements * wire.itemsize)
            return
        if is_scattered(destination, source):
            self._scattered.append((destination, source))
            self.temporary_bytes = max(self.temporary_bytes, SCRATCH_BYTES)
            return
        if destination.dtype == source.dtype:
            # Copied as bits: not every dtype has a copy kernel.
            bits = _BITS[destination.element_size()]
            destination, source = destination.view(bits), source.view(bits)
        pair = (destination.dtype, source.dtype)
        destinations, sources = self._alike.setdefault(pair, ([], []))
        destinations.append(destination)
        sources.append(source)

    def run(self) -> None:
        """Make all copies."""
        with torch.no_grad():
            for destinations, sources in self._alike.values():
                torch._foreach_copy_(destinations, sources)
            for destination, source in self._scattered:
                cast_in_chunks(destination, source)
            for destination, source, wire in self._rounded:
                for target, piece in chunks(destination, source):
                    target.copy_(piece.to(wire))

    def __len__(self) -> int:
        alike = sum(len(sources) for _, sources in self._alike.values())
        return alike + len(self._scattered) + len(self._rounded)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of `reshard.dtypes`' names."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def part(view: torch.Tensor, region: Region, inner: Region) -> torch.Tensor:
    """The view of `inner`, which lies in `region`, given that of `region`."""
    if inner == region:
        return view
    index = tuple(
        slice(o - base, o - base + n)
        for o, n, base in zip(inner.offset, inner.shape, region.offset, strict=True)
    )
    return view[index]


def copy_between(copies: CopyList, sources: Places, destinations: Places, move: Move) -> None:
    """Add the copies of a move from local places to local places.

    Raises:
        ReshardError: the sources do not hold all that the destinations want.
    """
    wire = torch_dtype(move.wire_dtype)
    for wanted, destination in destinations:
        missing = wanted.volume
        for held, source in sources:
            common = wanted if held == wanted else wanted.intersect(held)
            if common is None or not common.volume:
                continue
            copies.add(part(destination, wanted, common), part(source, held, common), wire)
            missing -= common.volume
        if missing > 0:
            raise ReshardError(f"{move.name}: {missing} elements of {wanted} have no source")


def checked(places: Places, move: Move, what: str) -> Places:
    """The places of a move, after a look at their shapes and at how much they hold.

    Raises:
        ReshardError: a view without its region's shape, outside the move, or elements missing.
    """
    held = 0
    for region, view in places:
        if tuple(view.shape) != region.shape:
            raise ReshardError(
                f"{move.name}: {what} view of shape {tuple(view.shape)} for region {region}"
            )
        if region != move.region and region.intersect(move.region) != region and region.volume:
            raise ReshardError(f"{move.name}: {what} region {region} is not in {move.region}")
        held += region.volume
    if held < move.region.volume:
        raise ReshardError(
            f"{move.name}: {what} places hold {held} of the {move.region.volume} elements of "
            f"{move.region}"
        )
    return places
