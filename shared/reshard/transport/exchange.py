"""Executes one rank's part of a plan over the session's group: pack, send, receive, unpack.

All receives are under way before the first send, several peers at once, in buffers that are made
once and bounded. Not here: gloo's and NCCL's ways of waiting (`windows.py`, `rounds.py`), shared
memory (`shm.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from reshard.board import Deadline
from reshard.errors import DigestMismatch
from reshard.plan import RankPlan
from reshard.transport.bounds import IN_FLIGHT
from reshard.transport.group import RefitGroup
from reshard.transport.messages import Message
from reshard.transport.places import CopyList, Locate, copy_between
from reshard.transport.report import ExchangeReport
from reshard.transport.rounds import Rounds
from reshard.transport.schedule import make_schedule
from reshard.transport.timing import Timing
from reshard.transport.watch import Watch
from reshard.transport.windows import Windows
from reshard.wire import decode, encode

_MAX_GREETING_BYTES = 2**24


class Greeting(msgspec.Struct, frozen=True):
    """What a rank is about to do, agreed with its peers before the first byte.

    Attributes:
        attempt: number of the refit.
        fingerprints: by peer: a hash of the messages to and from it.
    """

    attempt: int
    fingerprints: dict[int, str]


class Executor(Protocol):
    """Makes a schedule's transfers."""

    @property
    def sends(self) -> Sequence[Message]:
        """In order."""

    @property
    def receives(self) -> Sequence[Message]:
        """In order."""

    def run(self, watch: Watch, timing: Timing, deadline: Deadline, attempt: int) -> None:
        """Make all transfers.

        Raises:
            TransferFailed: a message was lost.
        """


class Exchange:
    """One rank's transfers, made ready once and run at every refit.

    The views that `read` and `write` return are kept: where a storage moves, make a new exchange.
    Exchanges of one group share buffers, so only one runs at a time.
    """

    def __init__(
        self,
        group: RefitGroup,
        rank_plan: RankPlan,
        read: Locate,
        write: Locate,
        bucket_bytes: int,
        *,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        """Cut the plan into messages. Touches no memory before the first run.

        Args:
            group: the session's.
            rank_plan: this rank's part.
            read: where this rank holds the elements of a move.
            write: where it puts them; all places of an element.
            bucket_bytes: largest message, in bytes; the same on all ranks.
            in_flight: messages under way at one time, each way; the same on all ranks.
        """
        self._group = group
        self._plan = rank_plan
        self._read = read
        self._write = write
        self._in_flight = in_flight
        self._schedule = make_schedule(rank_plan, group.size, bucket_bytes)
        self._executor: Executor | None = None
        self._local = CopyList()

    def run(self, deadline: Deadline, attempt: int) -> ExchangeReport:
        """Make all transfers of one refit.

        Args:
            deadline: for all of it.
            attempt: number of the refit within its session; never twice the same.

        Raises:
            PeerError: another rank failed, or did not take part in time: names it, the tensor and
                the phase. The group is then closed on this rank.
            DigestMismatch: two ranks cut their messages differently; nothing was sent.
            ReshardError: this rank failed; the others are told.
        """
        timing = Timing()
        scope = f"{self._group.session}/a{attempt}"
        watch = Watch(self._group, scope, deadline, "prepare")
        try:
            with watch:
                with timing("prepare"):
                    executor = self._prepared()
                watch.phase = "agree"
                with timing("agree"):
                    self._agree(watch, scope, attempt, deadline)
                watch.phase = "transfer"
                executor.run(watch, timing, deadline, attempt)
                watch.phase = "local"
                with timing("local"):
                    self._local.run()
        except Exception as error:
            failure = watch.failure(error)
            if failure is error:
                raise
            raise failure from error
        return self._report(executor, timing)

    def _prepared(self) -> Executor:
        """The messages and their copies, made at the first run."""
        if self._executor is None:
            for move in self._plan.local:
                copy_between(self._local, self._read(move), self._write(move), move)
            self._executor = self._make_executor()
        return self._executor

    def _make_executor(self) -> Executor:
        kind = Rounds if self._group.backend == "nccl" else Windows
        return kind(self._group, self._schedule, self._read, self._write, self._in_flight)

    def _agree(self, watch: Watch, scope: str, attempt: int, deadline: Deadline) -> None:
        """Meet the peers of this attempt, and make sure that the messages are the same."""
        group, own = self._group, dict(self._schedule.fingerprints)
        if not own:
            return
        greeting = encode(Greeting(attempt, own))
        group.board.put(f"{scope}/exchange/{group.rank}", greeting, deadline)
        found = watch.gather(
            f"{scope}/exchange", tuple(own), "waiting for {} to come to the exchange"
        )
        theirs = {
            peer: decode(raw, Greeting, limit=_MAX_GREETING_BYTES, sender=group.name(peer))
            for peer, raw in found.items()
        }
        self._compare(own, theirs, attempt)

    def _compare(
        self, own: Mapping[int, str], theirs: Mapping[int, Greeting], attempt: int
    ) -> None:
        group = self._group
        faults = []
        for peer, greeting in theirs.items():
            told = greeting.fingerprints.get(int(group.rank))
            if (greeting.attempt, told) != (attempt, own[peer]):
                faults.append(
                    f"{group.name(peer)}: attempt {greeting.attempt}, messages {told}; "
                    f"{group.name(group.rank)}: attempt {attempt}, messages {own[peer]}"
                )
        if faults:
            raise DigestMismatch(
                "ranks would send and receive different messages; nothing was sent. Do all have "
                "the same plan and the same bucket_bytes?",
                faults,
            )

    def _report(self, executor: Executor, timing: Timing) -> ExchangeReport:
        received: dict[int, int] = {}
        sent: dict[int, int] = {}
        for total, several in ((received, executor.receives), (sent, executor.sends)):
            for message in several:
                total[message.peer] = total.get(message.peer, 0) + message.buffer.numel()
        messages = (*executor.receives, *executor.sends)
        temporary = max(
            (m.copies.temporary_bytes for m in messages if m.copies is not None), default=0
        )
        return ExchangeReport(
            received_bytes=received,
            sent_bytes=sent,
            local_bytes=sum(move.nbytes for move in self._plan.local),
            seconds=dict(timing.seconds),
            messages=len(messages),
            direct_bytes=sum(m.buffer.numel() for m in executor.receives if m.copies is None),
            peak_extra_bytes=self._group.staging.held_bytes
            + max(temporary, self._local.temporary_bytes),
        )
