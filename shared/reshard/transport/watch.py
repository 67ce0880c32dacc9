"""Looks after a rank's transfers while it waits in them: faults, deadlines, who is to blame.

A wait of gloo can neither be polled nor cancelled, and one that expires cuts healthy peers off,
who then blame this rank. So the transfers wait without a limit of their own, and this thread ends
them: it writes the culprit down first and closes the connections after that.
"""

import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass

import msgspec

from reshard import board
from reshard.board import Deadline
from reshard.errors import ReshardError, WireError
from reshard.session import Fault
from reshard.transport.faults import blame
from reshard.transport.group import RefitGroup
from reshard.wire import decode, encode

_BEAT_SECONDS = 0.5
_FRESH_SECONDS = 2.0
_BOARD_SECONDS = 2.0
_MAX_NOTE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank waits for.

    Attributes:
        peer: the other end.
        tensor: what the message holds, for messages.
        action: `sending` or `receiving` and so on, for messages.
        since: on the monotonic clock, in seconds.
    """

    peer: int
    tensor: str
    action: str
    since: float


class Stall(msgspec.Struct, frozen=True):
    """A rank's note on the board: it has been waiting for this peer."""

    peer: int
    tensor: str


class Watch:
    """Runs beside one attempt's transfers; a context manager.

    Attributes:
        step: what the rank waits for now; set by it.
        verdict: why the transfers were ended, once they were.
    """

    def __init__(self, group: RefitGroup, scope: str, deadline: Deadline) -> None:
        """Watch one attempt.

        Args:
            group: whose transfers.
            scope: the attempt's prefix on the board.
            deadline: of the attempt.
        """
        self.step: Step | None = None
        self.verdict: Fault | None = None
        self._group = group
        self._scope = scope
        self._deadline = deadline
        self._fault_watch: board.Watch | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reshard-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._fault_watch = self._group.board.watch(f"{self._group.session}/fault")
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._fault_watch is not None:
            self._fault_watch.end()
        self._thread.join()

    def waits_for(self, peer: int, tensor: str, action: str) -> None:
        """Say what the rank waits for from now on."""
        self.step = Step(peer, tensor, action, time.monotonic())

    def waits_no_more(self) -> None:
        """Say that the rank works by itself again."""
        self.step = None

    def blame(self, fault: Fault) -> Fault:
        """Write a failure down, unless another came first; the one that stands."""
        if self.verdict is None:
            self.verdict = blame(self._group, fault)
        return self.verdict

    def _run(self) -> None:
        while not self._ended.is_set():
            raw = self._wait_for_fault(min(_BEAT_SECONDS, self._deadline.remaining()))
            if self._ended.is_set():
                return
            if raw is not None:
                self.verdict = _fault(raw)
            elif self._deadline.expired:
                self.blame(self._overdue())
            else:
                self._note_stall()
                continue
            self._group.abort()
            return

    def _wait_for_fault(self, seconds: float) -> bytes | None:
        assert self._fault_watch is not None
        try:
            return self._fault_watch.value(seconds)
        except CancelledError:
            return None
        except ReshardError:
            # The board is gone. The deadline still holds.
            self._ended.wait(seconds)
            return None

    def _note_stall(self) -> None:
        """Tell the others whom this rank waits for, once it has waited for a while."""
        step = self.step
        if step is None or time.monotonic() - step.since < _BEAT_SECONDS:
            return
        try:
            self._group.board.put(
                f"{self._scope}/waiting/{self._group.rank}",
                encode(Stall(step.peer, step.tensor)),
                Deadline.after(_BOARD_SECONDS),
            )
        except ReshardError:
            return

    def _overdue(self) -> Fault:
        """The fault of a deadline that passed: who holds up the one that this rank waits for.

        A peer that waits for another, and says so, is a victim itself; one that has stopped says
        nothing any more.
        """
        seconds = self._deadline.seconds
        step = self.step
        if step is None:
            return Fault(
                self._group.rank, "transfer", f"did not get to its transfers within {seconds:g} s"
            )
        peer, tensor = step.peer, step.tensor
        seen = {int(self._group.rank)}
        while peer not in seen:
            seen.add(peer)
            note = self._stall_of(peer)
            if note is None or note.peer in seen:
                break
            peer, tensor = note.peer, note.tensor
        return Fault(
            peer,
            "transfer",
            f"did not take part within {seconds:g} s ({self._group.name(self._group.rank)} was "
            f"{step.action} {step.tensor})",
            tensor,
        )

    def _stall_of(self, rank: int) -> Stall | None:
        """The fresh note of a rank, if there is one."""
        key = f"{self._scope}/waiting/{rank}"
        try:
            found = self._group.board.look((key,), Deadline.after(_BOARD_SECONDS))
            if key not in found.values or found.ages[key] > _FRESH_SECONDS:
                return None
            return decode(found.values[key], Stall, limit=_MAX_NOTE_BYTES)
        except ReshardError:
            return None


def _fault(raw: bytes) -> Fault:
    try:
        return decode(raw, Fault)
    except WireError as error:
        return Fault(-1, "transfer", f"the session's fault cannot be read: {error}")
