"""One engine, as one trainer rank sees it: sessions, and refits within them.

All trainer ranks take each step together; how it ended is rank 0's verdict. After any failure the
session is over, and the next refit opens another, in the same processes. Not here: the control
calls (`pilot.py`), the bytes (`session.py`).
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from reshard.board import Deadline
from reshard.errors import DeadlineExceeded, ReshardError
from reshard.ids import PolicyVersion
from reshard.layout.side import alike
from reshard.plan import TransferPlan
from reshard.session import ConnectInfo, ReceiveInfo, attempt_scope, scope
from reshard.wire import decode, encode
from reshard_trainer.census import Holdings, Standing
from reshard_trainer.pilot import Pilot
from reshard_trainer.reports import EngineReport
from reshard_trainer.run import TrainerRun
from reshard_trainer.session import Session, open_session
from reshard_trainer.verdicts import REPORT_SECONDS, ErrorRecord, Verdict, write_fault

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Staged:
    """A refit that has begun.

    Attributes:
        deadline: for the bytes.
        kept: whether the weights may change already.
        failure: of this rank; the refit fails on all.
        over: how it ended, where it did before it began.
    """

    deadline: Deadline = field(default_factory=lambda: Deadline.after(0))
    kept: bool = False
    failure: Exception | None = None
    over: Verdict | None = None


class EngineLink:
    """The way from this trainer rank to one engine.

    Attributes:
        name: the engine's.
    """

    def __init__(self, name: str, run: TrainerRun, pilot: Pilot | None) -> None:
        """Prepare; nothing is sent.

        Args:
            name: the engine's.
            run: this rank's place.
            pilot: on trainer rank 0, the engine's control plane.
        """
        self.name = name
        self._run = run
        self._pilot = pilot
        self._epoch = 0
        self._attempt = 0
        self._session: Session | None = None
        self._layout_digest = ""
        self._connect_seconds = 0.0

    @property
    def standing(self) -> Standing:
        """How far this rank has come with the engine."""
        return Standing(self._epoch, self._attempt, self._session is not None)

    def align(self, standings: Sequence[Standing]) -> None:
        """Begin anew where trainer ranks have come differently far.

        A rank that missed a step (it hung, and the others went on) would count sessions otherwise
        than they do from then on, and meet them nowhere.
        """
        if len(set(standings)) > 1:
            self._leave()
            self._epoch = max(standing.epoch for standing in standings)

    def connect(self, holdings: Holdings) -> Verdict:
        """Open a session for these holdings, unless it is open already."""
        self._connect_seconds = 0.0
        if self._session is not None and self._layout_digest == holdings.digest:
            return Verdict()
        self._leave()
        self._epoch += 1
        self._attempt = 0
        prefix = scope(self.name, self._epoch)
        start = time.perf_counter()
        verdict = self._together(f"{prefix}/connect", lambda: self._open(prefix, holdings))
        self._connect_seconds = time.perf_counter() - start
        self._layout_digest = holdings.digest
        return verdict

    def stage(self, connected: Verdict) -> Staged:
        """Begin a refit: have the trainer's weights, as they are now, kept for the engine.

        Args:
            connected: how `connect` ended.
        """
        if connected.error is not None:
            return Staged(over=connected)
        assert self._session is not None
        self._attempt += 1
        deadline = Deadline.after(self._run.settings.deadline_seconds)
        try:
            kept = self._session.stage(self._attempt, deadline)
        except Exception as error:
            return Staged(deadline, failure=error)
        return Staged(deadline, kept=kept)

    def complete(
        self, version: PolicyVersion, staged: Staged, release: Callable[[], None]
    ) -> Verdict:
        """Bring the engine to what was staged, as `version`; may run beside the training.

        Args:
            version: of the staged weights.
            staged: what `stage` returned.
            release: called once the weights may change, at the latest when this returns.
        """
        if staged.over is not None:
            release()
            return staged.over
        key = f"{attempt_scope(self.name, self._epoch, self._attempt)}/refit"
        try:
            return self._together(key, lambda: self._transfer(version, key, staged, release))
        finally:
            release()

    def close(self) -> None:
        """Leave the session; on rank 0, have the engine leave it, too."""
        self._leave()
        if self._pilot is not None:
            self._pilot.release()

    def _together(self, key: str, step: Callable[[], EngineReport | None]) -> Verdict:
        """Take this rank's part of a step, and learn how it ended for all."""
        failure: BaseException | None = None
        report = None
        try:
            report = step()
        except BaseException as error:
            phase = key.rpartition("/")[2]
            write_fault(
                self._run.board, scope(self.name, self._epoch), self._run.rank, phase, error
            )
            failure = error
        if self._pilot is not None:
            verdict = self._judge(self._pilot, key, failure, report)
            self._tell(key, verdict)
        else:
            verdict = self._hear(key, failure)
        if verdict.error is not None or failure is not None:
            self._leave()
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        return verdict

    def _judge(
        self,
        pilot: Pilot,
        key: str,
        failure: BaseException | None,
        report: EngineReport | None,
    ) -> Verdict:
        """Rank 0: how the step ended, and how the engine was left."""
        if failure is None:
            return Verdict(report=report)
        if not isinstance(failure, ReshardError):
            logger.error("refit of engine %s failed", self.name, exc_info=failure)
        record = ErrorRecord.of_rank(pilot.explain(failure), 0, key.rpartition("/")[2])
        return Verdict(record, pilot.abandon())

    def _tell(self, key: str, verdict: Verdict) -> None:
        try:
            self._run.board.put(key, encode(verdict), Deadline.after(REPORT_SECONDS))
        except ReshardError:
            logger.exception("the control board is gone; other trainer ranks end by themselves")

    def _hear(self, key: str, failure: BaseException | None) -> Verdict:
        """Any other rank: what rank 0 says; one's own failure only if it says nothing."""
        # Rank 0 may take one deadline to connect or receive, one to commit, and tidies up after.
        patience = Deadline.after(self._run.settings.patience_seconds)
        try:
            verdict = decode(self._run.board.get(key, patience), Verdict)
        except ReshardError as error:
            silence = DeadlineExceeded(
                f"trainer rank 0 did not say how the refit of {self.name} ended: {error}"
            )
            phase = key.rpartition("/")[2]
            record = ErrorRecord.of_rank(failure or silence, self._run.rank, phase)
            return Verdict(record, "unknown")
        if failure is not None and verdict.error is None:
            logger.warning(
                "trainer rank %d failed where others went on: %s", self._run.rank, failure
            )
        return verdict

    def _open(self, prefix: str, holdings: Holdings) -> None:
        board, rank = self._run.board, self._run.rank
        deadline = Deadline.after(self._run.settings.deadline_seconds)
        if self._pilot is None:
            key, raw = board.get_any([f"{prefix}/session", f"{prefix}/connect"], deadline)
            if key != f"{prefix}/session":
                decode(raw, Verdict).raise_error()
            info = decode(raw, ConnectInfo)
        else:
            info = self._invite(self._pilot, deadline)
            board.put(f"{prefix}/specs", encode(holdings.specs), deadline)
            board.put(f"{prefix}/session", encode(info), deadline)
            self._pilot.connect(info, deadline)
        self._session = open_session(
            board,
            info,
            rank,
            self._run.source,
            self._run.settings.share,
            deadline,
            keeps=self._run.settings.keeps,
        )
        if self._pilot is not None:
            self._pilot.settle(deadline)
            logger.info(
                "engine %s: a refit (%s) takes %s bytes beside the weights on its ranks",
                self.name,
                info.install,
                ", ".join(map(str, self._session.joined.world.staging_bytes)),
            )
            _warn_of_rounding(self.name, self._session.joined.plan)
            if self._epoch > 2:
                board.delete_prefix(f"{scope(self.name, self._epoch - 2)}/")

    def _invite(self, pilot: Pilot, deadline: Deadline) -> ConnectInfo:
        settings = self._run.settings
        description = pilot.describe(deadline)
        return ConnectInfo(
            run_id=self._run.run_id,
            engine=self.name,
            epoch=self._epoch,
            trainer_size=self._run.size,
            engine_size=description.ranks,
            invitation=self._run.invitation,
            host=settings.group_host,
            transport=settings.transport,
            install=settings.install,
            bucket_bytes=settings.bucket_bytes,
            buffer_bytes=settings.buffer_bytes,
            deadline_seconds=settings.deadline_seconds,
            takeover=settings.takeover,
            verify=settings.verify,
            stored=settings.stored,
        )

    def _transfer(
        self,
        version: PolicyVersion,
        verdict_key: str,
        staged: Staged,
        release: Callable[[], None],
    ) -> EngineReport | None:
        """One refit: start the engine, exchange, have it commit; the report, on rank 0."""
        if staged.failure is not None:
            raise staged.failure
        session, deadline = self._session, staged.deadline
        assert session is not None
        board = self._run.board
        prefix = attempt_scope(self.name, self._epoch, self._attempt)
        order = ReceiveInfo(
            self._run.run_id, self._epoch, self._attempt, version, session.joined.plan.digest
        )
        if self._pilot is None:
            key, raw = board.get_any([f"{prefix}/go", verdict_key], deadline)
            if key == verdict_key:
                decode(raw, Verdict).raise_error()
            session.exchange(self._attempt, deadline, release)
            return None
        self._pilot.begin(session.info, order, deadline)
        board.put(f"{prefix}/go", b"", deadline)
        start = time.perf_counter()
        exchanged = session.exchange(self._attempt, deadline, release)
        self._pilot.seconds["transfer"] = time.perf_counter() - start
        settings = self._run.settings
        commit_deadline = Deadline.after(settings.deadline_seconds)
        self._pilot.install(session.info, order, settings.prefix_cache, commit_deadline)
        if self._attempt > 2:
            board.delete_prefix(f"{attempt_scope(self.name, self._epoch, self._attempt - 2)}/")
        report = session.report(version, exchanged)
        seconds = {"connect": self._connect_seconds, **self._pilot.seconds, **report.seconds}
        return replace(report, seconds=seconds, pause_seconds=self._pilot.pause_seconds)

    def _leave(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def _warn_of_rounding(engine: str, plan: TransferPlan) -> None:
    """fp32 loses its last bits in bf16, as everybody knows; that fp16 loses three is a surprise."""
    lossy = sorted(
        name
        for each in plan.classes
        if (each.source_dtype, each.wire_dtype) == ("float16", "bfloat16")
        for name in each.names
    )
    if lossy:
        logger.warning(
            "engine %s computes in bfloat16, the trainer holds float16: rounding costs three bits "
            "of %s; train in bfloat16 or float32, or start the engine with --dtype float16",
            engine,
            alike(lossy),
        )
