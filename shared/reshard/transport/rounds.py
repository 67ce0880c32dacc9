"""NCCL's way of executing a schedule: grouped rounds on a stream of its own.

A round holds the same messages on both of their ends. Packing the next round runs beside the
round that is under way, in a second set of buffers. Nothing synchronises the device before the
end. On CPUs the same rounds run over gloo, which is how this module is tested; it never ran on a
GPU.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch

from reshard.board import Deadline
from reshard.transport.faults import TransferFailed
from reshard.transport.group import RefitGroup, Work
from reshard.transport.messages import Message, prepare
from reshard.transport.places import Locate
from reshard.transport.schedule import Schedule, Transfer
from reshard.transport.timing import Timing
from reshard.transport.watch import Watch

_POLL_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Round:
    """Messages that start together."""

    sends: Sequence[Message]
    receives: Sequence[Message]

    @property
    def first(self) -> Message:
        """One of them, to name in messages."""
        return (*self.receives, *self.sends)[0]


class Rounds:
    """The messages of one rank, made ready once and sent at every refit.

    Attributes:
        sends: in order.
        receives: in order.
    """

    def __init__(
        self, group: RefitGroup, schedule: Schedule, read: Locate, write: Locate, in_flight: int
    ) -> None:
        """Make ready.

        Args:
            group: gloo or NCCL.
            schedule: this rank's transfers.
            read: where elements lie.
            write: where elements belong.
            in_flight: messages either way in one round; two rounds have buffers.
        """
        self._group = group
        keys = sorted({t.round(in_flight) for t in (*schedule.sends, *schedule.receives)})
        # Even and odd rounds of this rank use their own buffers.
        parity = {key: position % 2 for position, key in enumerate(keys)}
        self.sends = self._prepare(schedule.sends, "sending", read, parity, in_flight)
        self.receives = self._prepare(schedule.receives, "receiving", write, parity, in_flight)
        sends = _by_round(self.sends, in_flight)
        receives = _by_round(self.receives, in_flight)
        self._rounds = [Round(sends.get(key, []), receives.get(key, [])) for key in keys]

    def _prepare(
        self,
        transfers: Sequence[Transfer],
        action: str,
        locate: Locate,
        parity: dict[tuple[int, int], int],
        in_flight: int,
    ) -> list[Message]:
        slots = []
        for key, members in groupby(transfers, lambda t: t.round(in_flight)):
            slots += [parity[key] * in_flight + place for place, _ in enumerate(members)]
        return prepare(transfers, slots, action, locate, self._group.staging)

    def run(self, watch: Watch, timing: Timing, deadline: Deadline, attempt: int) -> None:
        """Make all transfers; on return the device is done with them.

        Raises:
            TransferFailed: a message was lost.
        """
        del attempt  # NCCL has no tags: an aborted communicator takes its messages with it.
        with _own_stream(self._group.device):
            under_way: tuple[Round, list[Work]] | None = None
            for each in self._rounds:
                with timing("pack"):
                    _copy(each.sends)
                started = self._start(each)
                if under_way is not None:
                    _finish(*under_way, watch, timing, deadline)
                under_way = (each, started)
            if under_way is not None:
                _finish(*under_way, watch, timing, deadline)
            with timing("transfer"):
                self._synchronize(watch)

    def _start(self, each: Round) -> list[Work]:
        try:
            return self._group.batch(
                [(message.buffer, message.peer) for message in each.sends],
                [(message.buffer, message.peer) for message in each.receives],
            )
        except RuntimeError as error:
            raise each.first.failed(error) from error

    def _synchronize(self, watch: Watch) -> None:
        """Wait until the device has done all of it: polled, so that the watch ends the wait."""
        if self._group.device.type != "cuda" or not self._rounds:
            return
        last = self._rounds[-1].first
        watch.waits_for(last.peer, last.transfer.tensors, last.action)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        while not done.query():  # type: ignore[no-untyped-call]
            if watch.verdict is not None:
                raise TransferFailed(watch.verdict.rank, "", "waiting", "the transfers were ended")
            time.sleep(_POLL_SECONDS)


def _by_round(messages: Sequence[Message], width: int) -> dict[tuple[int, int], list[Message]]:
    grouped = groupby(messages, lambda message: message.transfer.round(width))
    return {key: list(members) for key, members in grouped}


def _copy(messages: Sequence[Message]) -> None:
    for message in messages:
        if message.copies is not None:
            message.copies.run()


def _finish(
    each: Round, works: list[Work], watch: Watch, timing: Timing, deadline: Deadline
) -> None:
    """Wait for a round (gloo: here; NCCL: on the stream) and unpack it."""
    messages = (*each.receives, *each.sends)
    with timing("transfer"):
        for message, work in zip(messages, works, strict=False):
            message.finish(work, watch, deadline)
    with timing("unpack"):
        _copy(each.receives)


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Run the body on a stream that follows, and is followed by, the current one."""
    if device.type != "cuda":
        yield
        return
    current = torch.cuda.current_stream(device)
    own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    own.wait_stream(current)
    with torch.cuda.stream(own):
        yield
    current.wait_stream(own)
