"""What a sender shows its readers in shared memory: a snapshot as it travels, or live shards.

A manifest says where each region lies. It is made once a layout; a refit changes the bytes only.
"""

import os
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from reshard.dtypes import DType, parse_dtype
from reshard.errors import ReshardError
from reshard.layout.boxes import union
from reshard.layout.region import Region
from reshard.layout.view import StridedView
from reshard.plan import Move
from reshard.transport.memory import OwnedSegment, Segment, share_storage
from reshard.transport.places import CopyList, Locate, Places, checked, part, torch_dtype

_ALIGNMENT = 64
_SPARE_DESCRIPTORS = 64


class Placed(msgspec.Struct, frozen=True):
    """One region in shared memory.

    Attributes:
        region: global.
        segment: position in `Manifest.segments`.
        view: in elements of `dtype`, from the segment's start.
        dtype: as it lies there.
    """

    region: Region
    segment: int
    view: StridedView
    dtype: DType


class Shown(msgspec.Struct, frozen=True):
    """What is shown of one tensor for readers that want it in one wire dtype."""

    name: str
    wire_dtype: DType
    places: tuple[Placed, ...]


class Manifest(msgspec.Struct, frozen=True):
    """What one sender shows.

    Attributes:
        header: eight bytes that hold the seal: see `shm.py`.
        segments: the memory.
        tensors: what lies where.
    """

    header: Segment
    segments: tuple[Segment, ...]
    tensors: tuple[Shown, ...]


class Exhibit(Protocol):
    """A sender's memory that readers see."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The memory."""

    @property
    def tensors(self) -> tuple[Shown, ...]:
        """What lies where."""

    @property
    def extra_bytes(self) -> int:
        """Memory that it takes beside the weights."""

    def refresh(self) -> None:
        """Show the present values."""

    def close(self) -> None:
        """Give up the memory; readers keep what they have mapped."""


class Snapshot:
    """A copy, cast once, of the union of what the readers need."""

    def __init__(self, moves: Iterable[Move], read: Locate) -> None:
        """Lay it out and allocate it; `refresh` fills it.

        Args:
            moves: all moves to readers; overlaps are held once.
            read: where this rank holds their elements.

        Raises:
            ReshardError: there is no room.
        """
        boxes = wanted(moves)
        offsets, total = _lay_out(boxes)
        self._memory = OwnedSegment("reshard-snapshot", total)
        self._copies = CopyList()
        placed: dict[tuple[str, DType], list[Placed]] = {}
        for box, offset in zip(boxes, offsets, strict=True):
            dtype = torch_dtype(box.wire_dtype)
            flat = self._memory.memory[offset : offset + box.nbytes].view(dtype)
            shown = flat.view(box.region.shape)
            for region, source in checked(read(box), box, "source"):
                self._copies.add(part(shown, box.region, region), source, dtype)
            view = StridedView.contiguous(box.region.shape, offset // dtype.itemsize)
            entry = Placed(box.region, 0, view, box.wire_dtype)
            placed.setdefault((box.name, box.wire_dtype), []).append(entry)
        self.segments = (self._memory.segment,)
        self.tensors = _shown(placed)
        self.extra_bytes = total

    def refresh(self) -> None:
        """Copy the present values."""
        self._copies.run()

    def close(self) -> None:
        """Give up the memory; readers keep what they have mapped."""
        self._memory.close()


class LiveShards:
    """The sender's own storages, moved into shared memory once; readers cast.

    No copy is made, so the values must not change while a refit runs.
    """

    def __init__(self, moves: Iterable[Move], read: Locate) -> None:
        """Move the storages of all that the readers need; arguments as for `Snapshot`.

        Raises:
            ReshardError: no room in /dev/shm, too few file descriptors, or weights on a device.
        """
        found = [(box, checked(read(box), box, "source")) for box in wanted(moves)]
        storages = _storages(places for _, places in found)
        _check_limits(storages)
        positions = {data: position for position, data in enumerate(storages)}
        # Positions by address: read before the storages move.
        located = [
            (box, region, positions[view.untyped_storage().data_ptr()], view)
            for box, places in found
            for region, view in places
            if region.volume
        ]
        self.segments = tuple(share_storage(storage) for storage in storages.values())
        placed: dict[tuple[str, DType], list[Placed]] = {}
        for box, region, position, view in located:
            strided = StridedView(
                int(view.storage_offset()), tuple(view.shape), tuple(view.stride())
            )
            entry = Placed(region, position, strided, parse_dtype(str(view.dtype)))
            placed.setdefault((box.name, box.wire_dtype), []).append(entry)
        self.tensors = _shown(placed)
        self.extra_bytes = 0

    def refresh(self) -> None:
        """Nothing: readers see the live values."""

    def close(self) -> None:
        """Nothing: the weights stay where they are, and serve the trainer."""


def wanted(moves: Iterable[Move]) -> list[Move]:
    """Disjoint moves that together hold all of the given ones, sorted."""
    regions: dict[tuple[str, DType], list[Move]] = {}
    for move in moves:
        regions.setdefault((move.name, move.wire_dtype), []).append(move)
    return [
        Move(group[0].name, region, group[0].source_dtype, group[0].wire_dtype)
        for _, group in sorted(regions.items())
        for region in union(move.region for move in group)
    ]


def _lay_out(boxes: Sequence[Move]) -> tuple[list[int], int]:
    """Where each box starts, in bytes, and the size of all."""
    offsets, end = [], 0
    for box in boxes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(start)
        end = start + box.nbytes
    return offsets, end


def _shown(placed: dict[tuple[str, DType], list[Placed]]) -> tuple[Shown, ...]:
    return tuple(Shown(name, wire, tuple(places)) for (name, wire), places in placed.items())


def _storages(found: Iterable[Places]) -> dict[int, torch.UntypedStorage]:
    """The storages of all views, by address."""
    storages: dict[int, torch.UntypedStorage] = {}
    for places in found:
        for region, view in places:
            if view.device.type != "cpu":
                raise ReshardError(
                    f"a shard on {view.device} cannot be shown in shared memory; choose snapshots"
                )
            if region.volume:
                storage = view.untyped_storage()
                storages[storage.data_ptr()] = storage
    return storages


def _check_limits(storages: dict[int, torch.UntypedStorage]) -> None:
    moving = [storage for storage in storages.values() if not storage.is_shared()]
    used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if used + len(moving) + _SPARE_DESCRIPTORS > limit:
        raise ReshardError(
            f"live shards need {len(moving)} file descriptors beside {used}, the limit is {limit}: "
            "raise `ulimit -n`, or publish snapshots"
        )
    room = os.statvfs("/dev/shm") if Path("/dev/shm").exists() else None
    needed = sum(storage.nbytes() for storage in moving)
    if room is not None and needed > room.f_bavail * room.f_frsize:
        raise ReshardError(
            f"live shards need {needed} bytes in /dev/shm, {room.f_bavail * room.f_frsize} are "
            "free: enlarge it, or publish snapshots"
        )
