"""One refit on one engine rank: bytes arrive on a thread, commit happens on the worker's.

Invariant: the live weights are of one version, or the fence is up. The fence goes up before the
first write to live storage and comes down after the last one.
"""

import logging
import threading
import time
from collections.abc import Callable

from reshard.agreement import gather
from reshard.board import Deadline
from reshard.errors import DigestMismatch, ReshardError
from reshard.session import RankResult, ReceiveInfo, attempt_scope
from reshard.verification import digest_moves, mismatches
from reshard.wire import decode, encode
from reshard_vllm.membership import Membership

logger = logging.getLogger(__name__)

_RESULT_SECONDS = 5.0


class Attempt:
    """Receives one version in the background; `commit` makes it live.

    Attributes:
        info: which run, epoch, attempt and version.
        commit_seconds: by step of the commit.
    """

    def __init__(
        self, session: Membership, info: ReceiveInfo, raise_fence: Callable[[str], None]
    ) -> None:
        if session.joined is None or session.installer is None or session.exchange is None:
            raise ReshardError(f"epoch {info.epoch} was never joined; connect again")
        self.info = info
        self.commit_seconds: dict[str, float] = {}
        self._session = session
        self._joined = session.joined
        self._installer = session.installer
        self._exchange = session.exchange
        self._raise_fence = raise_fence
        self._deadline = Deadline.after(session.info.deadline_seconds)
        self._received = False
        self._committed = False
        self._thread = threading.Thread(
            target=self._run, name=f"reshard-receive-v{info.version}", daemon=True
        )

    @property
    def received(self) -> bool:
        """Whether the version has arrived whole on all ranks."""
        return self._received

    def start(self) -> None:
        """Start receiving; returns at once."""
        self._thread.start()

    def end(self) -> None:
        """Wait for the thread (its waits have deadlines) and forget what it received.

        Raises:
            ReshardError: it does not end; its buffers may still be written.
        """
        self._thread.join(self._session.info.deadline_seconds)
        if self._thread.is_alive():
            raise ReshardError(
                f"attempt {self.info.attempt} of version {self.info.version} still runs after "
                f"{self._session.info.deadline_seconds:g} s; restart the engine"
            )
        self._installer.abandon()

    def commit(self) -> str:
        """Make the received version live on this rank; the error text, or empty."""
        self._thread.join(max(0.0, self._deadline.remaining()))
        if self._committed:
            return ""
        if not self._received:
            return f"version {self.info.version} has not arrived whole"
        self._raise_fence(self._torn_text())
        start = time.perf_counter()
        try:
            self._installer.commit()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        self.commit_seconds["commit"] = time.perf_counter() - start
        self._committed = True
        return ""

    def _torn_text(self) -> str:
        return (
            f"the install of version {self.info.version} did not finish; the weights may be of two "
            "versions until a full refit succeeds"
        )

    def _run(self) -> None:
        session = self._session
        prefix = attempt_scope(session.info.engine, session.info.epoch, self.info.attempt)
        ranks = range(session.info.trainer_size + session.info.engine_size)
        result = self._guarded_receive()
        # A rank that waited in vain still has to say so.
        after = Deadline.after(max(self._deadline.remaining(), _RESULT_SECONDS))
        try:
            answers = gather(
                session.board,
                f"{prefix}/received",
                session.rank,
                ranks,
                encode(result),
                after,
                trainer_size=session.info.trainer_size,
            )
            results = {rank: decode(raw, RankResult) for rank, raw in answers.items()}
        except ReshardError:
            # The trainer sees the same failure and does not ask for a commit.
            logger.exception("reshard: attempt %d was not received by all", self.info.attempt)
            return
        digests = {rank: result.digests for rank, result in results.items()}
        wrong = mismatches(digests, session.info.trainer_size)
        self._received = not wrong and not any(result.error for result in results.values())

    def _prepare(self) -> None:
        held = self._joined.plan.digest
        if self.info.plan_digest != held:
            raise DigestMismatch(f"plan {held} here, {self.info.plan_digest} asked for")
        if self._session.info.install == "in_place":
            self._raise_fence(self._torn_text())
        self._installer.begin()

    def _guarded_receive(self) -> RankResult:
        """As `_receive`; what nobody foresaw is told to all ranks, too."""
        try:
            return self._receive()
        except Exception as error:
            logger.exception("reshard: attempt %d failed", self.info.attempt)
            return RankResult(error=f"{type(error).__name__}: {error}")

    def _receive(self) -> RankResult:
        try:
            self._prepare()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            # The exchange tells the others of its own failures; this one is before it.
            self._session.report_fault("begin", text)
            return RankResult(error=text)
        try:
            report = self._exchange.run(self._deadline, self.info.attempt)
        except Exception as error:
            return RankResult(error=f"{type(error).__name__}: {error}")
        digests = {}
        seconds = dict(report.seconds)
        if self._session.info.verifies(self.info.attempt):
            start = time.perf_counter()
            plan = self._joined.plan.for_rank(self._session.rank)
            digests = digest_moves(plan.receives, self._session.places)
            seconds["verify"] = time.perf_counter() - start
        return RankResult(
            seconds=seconds,
            nbytes=sum(report.received_bytes.values()),
            extra_bytes=report.peak_extra_bytes + self._installer.staging_bytes,
            digests=digests,
        )
