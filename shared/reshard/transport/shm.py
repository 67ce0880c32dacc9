"""Ranks of one host: readers copy strided pieces straight out of the sender's memory.

No message carries weights. Per refit a sender shows its values, readers copy and say so, and the
sender takes the seal off. The seal is a number in shared memory: a reader that was too slow finds
another number there and knows that its bytes may be of two versions.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch

from reshard.board import Deadline
from reshard.errors import PeerError, ReshardError
from reshard.plan import Move, RankPlan
from reshard.session import Share
from reshard.transport.exhibits import Exhibit, LiveShards, Manifest, Shown, Snapshot
from reshard.transport.group import RefitGroup
from reshard.transport.memory import OwnedSegment, Segment, open_segment
from reshard.transport.places import CopyList, Locate, Places, copy_between, torch_dtype
from reshard.transport.report import ExchangeReport
from reshard.transport.timing import Timing
from reshard.transport.watch import Watch
from reshard.wire import decode, encode

_SEAL_BYTES = 8


class Announcement(msgspec.Struct, frozen=True):
    """A sender's values of one attempt can be read.

    Attributes:
        serial: of its manifest.
        seal: what the seal reads while they can.
    """

    serial: str
    seal: int


class ShmExchange:
    """One rank's transfers with ranks of its host, made ready once and run at every refit."""

    def __init__(
        self,
        group: RefitGroup,
        rank_plan: RankPlan,
        read: Locate,
        write: Locate,
        *,
        share: Share = "snapshot",
    ) -> None:
        """Remember the plan. Makes and maps nothing before the first run.

        Args:
            group: the session's; no byte of the weights goes through it.
            rank_plan: this rank's part; all its peers are on this host.
            read: where this rank holds the elements of a move.
            write: where it puts them; all places of an element.
            share: `snapshot`: a copy in the wire dtype, so that the weights may change as soon as
                `stage` has returned; `live`: the weights' own storages, moved into shared memory
                once, so that they may not change before `finish` has returned.
        """
        self._group = group
        self._plan = rank_plan
        self._read = read
        self._write = write
        self._share = share
        self._sent_bytes = {int(p): _nbytes(moves) for p, moves in rank_plan.sends.items()}
        self._received_bytes = {int(p): _nbytes(m) for p, m in rank_plan.receives.items()}
        self._readers = [peer for peer, nbytes in self._sent_bytes.items() if nbytes]
        self._senders = [peer for peer, nbytes in self._received_bytes.items() if nbytes]
        self._serial = os.urandom(8).hex()
        self._exhibit: Exhibit | None = None
        self._seal: OwnedSegment | None = None
        self._local: CopyList | None = None
        self._attached: dict[str, _Attached] = {}
        self._timing = Timing()

    @property
    def snapshots(self) -> bool:
        """Whether the weights may change once `stage` has returned."""
        return self._share == "snapshot" or not self._readers

    def run(self, deadline: Deadline, attempt: int) -> ExchangeReport:
        """Make all transfers of one refit: `stage`, `receive`, `finish`.

        Args:
            deadline: for all of it.
            attempt: number of the refit within its session; never twice the same.

        Raises:
            PeerError: another rank failed, or did not take part in time: names it and the phase.
            ReshardError: this rank failed; the others are told.
        """
        self.stage(deadline, attempt)
        self.receive(deadline, attempt)
        return self.finish(deadline, attempt)

    def stage(self, deadline: Deadline, attempt: int) -> None:
        """Show this rank's present values to its readers."""
        self._timing = Timing()
        if not self._readers:
            return
        with self._watched("stage", deadline, attempt), self._timing("stage"):
            exhibit, seal = self._opened(deadline)
            self.retire()
            exhibit.refresh()
            _seal_number(seal)[0] = 2 * attempt
            announcement = encode(Announcement(self._serial, 2 * attempt))
            key = f"{self._attempt(attempt)}/shm/{self._group.rank}"
            self._group.board.put(key, announcement, deadline)

    def receive(self, deadline: Deadline, attempt: int) -> None:
        """Copy what this rank needs out of the senders' memory."""
        if not self._senders and not self._plan.local:
            return
        with self._watched("copy", deadline, attempt) as watch:
            if self._senders:
                self._receive(watch, deadline, attempt)
            with self._timing("local"):
                self._local_copies().run()

    def finish(self, deadline: Deadline, attempt: int) -> ExchangeReport:
        """Wait until the readers have read; from now on the values may change."""
        if self._readers:
            with self._watched("read", deadline, attempt) as watch, self._timing("wait"):
                scope = f"{self._attempt(attempt)}/shm-read"
                watch.gather(scope, self._readers, "waiting for {} to read its weights")
                self.retire()
        return self._report()

    def retire(self) -> None:
        """Take the seal off: a reader that is still reading will notice."""
        if self._seal is not None:
            # Odd: nothing can be read.
            number = _seal_number(self._seal)
            number[0] = int(number[0]) | 1

    def close(self) -> None:
        """Give up the memory of this exchange; live weights stay where they are."""
        if self._exhibit is not None:
            self._exhibit.close()
        if self._seal is not None:
            self._seal.close()
        self._exhibit, self._seal = None, None
        self._attached.clear()

    def _attempt(self, attempt: int) -> str:
        return f"{self._group.session}/a{attempt}"

    def _opened(self, deadline: Deadline) -> tuple[Exhibit, OwnedSegment]:
        """This rank's exhibit, made and announced at the first refit."""
        if self._exhibit is None or self._seal is None:
            moves = [move for moves in self._plan.sends.values() for move in moves if move.nbytes]
            kind = LiveShards if self._share == "live" else Snapshot
            self._seal = OwnedSegment("reshard-seal", _SEAL_BYTES)
            self._exhibit = kind(moves, self._read)
            manifest = Manifest(self._seal.segment, self._exhibit.segments, self._exhibit.tensors)
            key = f"{self._group.session}/shm/{self._group.rank}/{self._serial}"
            self._group.board.put(key, encode(manifest), deadline)
        return self._exhibit, self._seal

    def _receive(self, watch: Watch, deadline: Deadline, attempt: int) -> None:
        scope = f"{self._attempt(attempt)}/shm"
        with self._timing("wait"):
            found = watch.gather(scope, self._senders, "waiting for {} to show its weights")
        announced = {
            sender: decode(raw, Announcement, sender=self._group.name(sender))
            for sender, raw in found.items()
        }
        with self._timing("prepare"):
            sources = [
                (sender, self._attach(sender, announcement.serial, deadline), announcement.seal)
                for sender, announcement in announced.items()
            ]
        with self._timing("copy"):
            for sender, source, seal in sources:
                self._check_seal(sender, source, seal)
                source.copies.run()
                self._check_seal(sender, source, seal)
        key = f"{self._attempt(attempt)}/shm-read/{self._group.rank}"
        self._group.board.put(key, b"", deadline)

    def _check_seal(self, sender: int, source: "_Attached", seal: int) -> None:
        if int(source.seal[0]) != seal:
            raise PeerError(
                f"the weights of {self._group.name(sender)} changed while this rank read them "
                f"(seal {int(source.seal[0])}, expected {seal}): this version is gone, and what "
                "was copied is not to be used"
            )

    def _attach(self, sender: int, serial: str, deadline: Deadline) -> "_Attached":
        """A sender's memory and the copies out of it, made at its first refit."""
        if serial not in self._attached:
            key = f"{self._group.session}/shm/{sender}/{serial}"
            owner = self._group.name(sender)
            manifest = decode(self._group.board.get(key, deadline), Manifest, sender=owner)
            moves = next(m for peer, m in self._plan.receives.items() if int(peer) == sender)
            self._attached[serial] = _Attached(manifest, moves, self._write, owner)
        return self._attached[serial]

    @contextmanager
    def _watched(self, phase: str, deadline: Deadline, attempt: int) -> Iterator[Watch]:
        """Watch the body, and tell the others of a failure in it."""
        watch = Watch(self._group, self._attempt(attempt), deadline, phase)
        try:
            with watch:
                yield watch
        except Exception as error:
            self.retire()
            failure = watch.failure(error)
            if failure is error:
                raise
            raise failure from error

    def _local_copies(self) -> CopyList:
        if self._local is None:
            self._local = CopyList()
            for move in self._plan.local:
                copy_between(self._local, self._read(move), self._write(move), move)
        return self._local

    def _report(self) -> ExchangeReport:
        copies = [each.copies for each in self._attached.values()]
        temporary = max((each.temporary_bytes for each in copies), default=0)
        return ExchangeReport(
            received_bytes=self._received_bytes,
            sent_bytes=self._sent_bytes,
            local_bytes=_nbytes(self._plan.local),
            seconds=dict(self._timing.seconds),
            messages=0,
            direct_bytes=sum(self._received_bytes.values()),
            peak_extra_bytes=temporary + (self._exhibit.extra_bytes if self._exhibit else 0),
        )


class _Attached:
    """A sender's memory in this process, and the copies out of it.

    Attributes:
        seal: one int64, in the sender's memory.
        copies: straight to their places.
    """

    def __init__(
        self, manifest: Manifest, moves: Sequence[Move], write: Locate, owner: str
    ) -> None:
        self.seal = open_segment(manifest.header, owner).view(torch.int64)
        self.copies = CopyList()
        self._segments: dict[Segment, torch.Tensor] = {}
        shown = {(each.name, each.wire_dtype): each for each in manifest.tensors}
        for move in moves:
            if not move.nbytes:
                continue
            tensor = shown.get((move.name, move.wire_dtype))
            if tensor is None:
                raise ReshardError(f"{owner} does not show {move.name} as {move.wire_dtype}")
            places = self._places(manifest, tensor, move, owner)
            copy_between(self.copies, places, write(move), move)

    def _places(self, manifest: Manifest, tensor: Shown, move: Move, owner: str) -> Places:
        places = []
        for placed in tensor.places:
            if placed.region.intersect(move.region) is None:
                continue
            segment = manifest.segments[placed.segment]
            if segment not in self._segments:
                self._segments[segment] = open_segment(segment, owner)
            dtype = torch_dtype(placed.dtype)
            memory = self._segments[segment]
            flat = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            view = placed.view
            places.append((placed.region, flat.as_strided(view.shape, view.stride, view.offset)))
        return places


def _seal_number(seal: OwnedSegment) -> torch.Tensor:
    return seal.memory.view(torch.int64)


def _nbytes(moves: Sequence[Move]) -> int:
    return sum(move.nbytes for move in moves)
