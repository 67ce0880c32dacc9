"""Looks after a rank's transfers while it waits in them: faults, deadlines, who is to blame.

A wait of gloo can neither be polled nor cancelled, and one that expires cuts healthy peers off,
who then blame this rank. So the transfers wait without a limit of their own, and this thread ends
them: it writes the culprit down first and closes the connections after that.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass

import msgspec

from reshard import board
from reshard.agreement import fault_error
from reshard.board import Deadline
from reshard.errors import ReshardError, WireError
from reshard.session import Fault
from reshard.transport.faults import TransferFailed, blame, standing_fault
from reshard.transport.group import RefitGroup
from reshard.wire import decode, encode

_BEAT_SECONDS = 0.5
_FRESH_SECONDS = 3.0
_BOARD_SECONDS = 2.0
_MAX_NOTE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank waits for.

    Attributes:
        peer: the other end.
        tensor: what the message holds, or empty; for messages.
        action: what the rank is doing, for messages.
        since: on the monotonic clock, in seconds.
    """

    peer: int
    tensor: str
    action: str
    since: float


class Stall(msgspec.Struct, frozen=True):
    """A rank's note on the board: it has been waiting for this peer.

    Attributes:
        peer, tensor, action: as in `Step`.
        phase: what the rank is at.
    """

    peer: int
    tensor: str
    action: str
    phase: str


class Watch:
    """Runs beside one rank's part of an attempt; a context manager.

    Attributes:
        phase: what the rank is at; set by it, for messages.
        step: what the rank waits for now; set by it.
        verdict: why the transfers were ended, once they were.
    """

    def __init__(self, group: RefitGroup, scope: str, deadline: Deadline, phase: str) -> None:
        """Watch one attempt; the thread starts with the `with` block.

        Args:
            group: whose transfers.
            scope: the attempt's prefix on the board.
            deadline: of the attempt.
            phase: what the rank is at, for messages.
        """
        self.phase = phase
        self.step: Step | None = None
        self.verdict: Fault | None = None
        self._group = group
        self._scope = scope
        self._deadline = deadline
        self._fault_key = f"{group.session}/fault"
        self._fault_watch: board.Watch | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reshard-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._fault_watch = self._group.board.watch((self._fault_key,))
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

    def gather(self, scope: str, ranks: Sequence[int], action: str) -> dict[int, bytes]:
        """What other ranks put under `scope`, once all have.

        Args:
            scope: key prefix; each rank's value lies at `<scope>/<rank>`.
            ranks: whose values to wait for.
            action: what this rank does meanwhile, for messages; `{}` stands for the rank.

        Raises:
            PeerError: the session has a fault, or they did not come by the deadline.
        """
        group = self._group
        keys = {rank: f"{scope}/{rank}" for rank in ranks}
        waiting = group.board.watch(tuple(keys.values()), unless=self._fault_key)
        try:
            while (found := waiting.found(_BEAT_SECONDS)) is None:
                if self.verdict is not None:
                    raise fault_error(self.verdict, group.trainer_size)
                self._find_absent(keys, action)
        finally:
            waiting.end()
        self.waits_no_more()
        if self._fault_key in found.values:
            raise fault_error(found.values[self._fault_key], group.trainer_size)
        return {rank: found.values[key] for rank, key in keys.items()}

    def _find_absent(self, keys: Mapping[int, str], action: str) -> None:
        """Say for whom a gathering waits.

        Raises:
            PeerError: for one whose process has ended.
        """
        # Before the look: what a rank put while it lived is on the board by then.
        ended = self._group.neighbours.ended(keys)
        try:
            missing = self._group.board.look(
                tuple(keys.values()), Deadline.after(_BOARD_SECONDS)
            ).missing
        except ReshardError:
            return
        absent = [rank for rank, key in keys.items() if key in missing]
        for rank in absent:
            if rank in ended:
                doing = action.format(self._group.name(rank))
                text = f"its process has ended ({self._group.name(self._group.rank)} was {doing})"
                fault = self.blame(Fault(rank, self.phase, text))
                raise fault_error(fault, self._group.trainer_size)
        for rank in absent[:1]:
            if self.step is None or self.step.peer != rank:
                self.waits_for(rank, "", action.format(self._group.name(rank)))

    def blame(self, fault: Fault) -> Fault:
        """Write a failure down, unless another came first; the one that stands."""
        if self.verdict is None:
            self.verdict = blame(self._group, fault)
        return self.verdict

    def failure(self, error: Exception) -> ReshardError:
        """Close the group after a failure of this rank's part; the error that it is to raise.

        The culprit is written down before anything that others could take for a failure of this
        rank. Whatever came first is to blame: `error` itself is returned only if that is it.
        """
        group = self._group
        own = int(group.rank)
        if isinstance(error, TransferFailed):
            observer = group.name(own)
            text = f"the connection broke ({observer} was {error.action}): {error}"
            suspect = Fault(error.peer, self.phase, text, error.tensor)
            fault = self.verdict or standing_fault(group) or self.blame(suspect)
            group.abort()
            return fault_error(fault, group.trainer_size)
        why = str(error) if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"
        fault = self.blame(Fault(own, self.phase, why))
        group.abort()
        if fault.rank != own:
            return fault_error(fault, group.trainer_size)
        if isinstance(error, ReshardError):
            return error
        return ReshardError(f"{group.name(own)} failed in phase {self.phase}: {why}")

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
            found = self._fault_watch.found(seconds)
            return None if found is None else found.values.get(self._fault_key)
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
                encode(self._stall(step)),
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
            return Fault(int(self._group.rank), self.phase, f"was not done within {seconds:g} s")
        # As the rank that waits for the culprit tells it, no matter whose deadline passes first.
        observer, stall = int(self._group.rank), self._stall(step)
        seen = {observer}
        while stall.peer not in seen:
            seen.add(stall.peer)
            note = self._stall_of(stall.peer)
            if note is None or note.peer in seen:
                break
            observer, stall = stall.peer, note
        doing = f"{stall.action} {stall.tensor}".rstrip()
        text = f"did not take part within {seconds:g} s ({self._group.name(observer)} was {doing})"
        return Fault(stall.peer, stall.phase, text, stall.tensor)

    def _stall(self, step: Step) -> Stall:
        return Stall(step.peer, step.tensor, step.action, self.phase)

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
