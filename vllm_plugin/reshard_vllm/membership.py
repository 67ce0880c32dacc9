"""This rank's membership in one session: introduce, describe, join, open the group.

Not here: which sessions are admitted (`receiver.py`), one refit (`attempt.py`).
"""

import logging
from collections.abc import Sequence
from typing import Literal

import torch

from reshard.agreement import report_fault
from reshard.board import BoardClient, Deadline
from reshard.errors import ReshardError
from reshard.hosts import host_identity
from reshard.ids import GroupRank
from reshard.joining import Joined, join
from reshard.layout.compact import CompactSide
from reshard.layout.holding import RankLayout
from reshard.layout.region import Region
from reshard.plan import Move
from reshard.session import (
    CommitInfo,
    ConnectInfo,
    EngineHello,
    Fault,
    LayoutReport,
    RankResult,
    TensorSpec,
    attempt_scope,
    scope,
)
from reshard.transport.bounds import Bound
from reshard.transport.choice import MixedExchange, open_exchange
from reshard.transport.group import RefitGroup, open_group
from reshard.transport.stored import StoredExchange
from reshard.wire import decode, encode
from reshard_vllm.target import Installer, Target

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 3.0


class Membership:
    """One session of one engine rank.

    Attributes:
        info: the session, as the trainer announced it.
        board: the run's control board.
        rank: this process's group rank.
        joined: the plan and the world; None until `join` succeeded.
        installer: where the bytes land; None until this rank has described itself.
        exchange: how they arrive; None until the group is open.
    """

    def __init__(self, info: ConnectInfo, board: BoardClient, target: Target) -> None:
        self.info = info
        self.board = board
        self.rank = GroupRank(info.trainer_size + target.rank)
        self.joined: Joined | None = None
        self.installer: Installer | None = None
        self.exchange: MixedExchange | StoredExchange | None = None
        self.group: RefitGroup | None = None
        self._target = target
        self._prefix = scope(info.engine, info.epoch)

    def introduce(
        self,
        state: Literal["ready", "fenced", "asleep", "taken", "failed"],
        detail: str,
        version: int | None,
        update_active: bool,
    ) -> None:
        """Put this rank's `EngineHello` on the board."""
        target = self._target
        hello = EngineHello(
            rank=target.rank,
            size=target.size,
            host=host_identity(),
            device=str(target.device),
            versions=dict(target.versions),
            model=target.model_name,
            state=state,
            detail=detail,
            run_id=self.info.run_id,
            version=version,
            update_active=update_active,
        )
        self.board.put(f"{self._prefix}/hello/{target.rank}", encode(hello))

    def join(self, deadline: Deadline) -> None:
        """Describe this rank's needs, build the common plan, open the private group.

        Raises:
            ReshardError: as it stands on the board, too.
        """
        report = self._describe(deadline)
        self.joined = join(self.board, self.info, self.rank, report, deadline)
        try:
            self.group = open_group(
                self.board,
                f"{self._prefix}/group",
                self.rank,
                self.info.trainer_size + self.info.engine_size,
                self._target.device if self.info.stored is None else torch.device("cpu"),
                self.info.host,
                deadline,
                trainer_size=self.info.trainer_size,
            )
        except ReshardError as error:
            self.report_fault("bootstrap", str(error))
            raise
        if self.info.stored is not None:
            plan = self.joined.plan.for_rank(self.rank)
            self.exchange = StoredExchange(self.info.stored, plan, self.places)
            return
        self.exchange = open_exchange(
            self.group,
            self.joined.plan.for_rank(self.rank),
            read=_nothing_to_read,
            write=self.places,
            bucket_bytes=self.info.bucket_bytes,
            transport=self.info.transport,
            hosts=self.joined.world.hosts,
            bound=Bound(self.info.buffer_bytes, self.joined.plan.sent_bytes),
        )

    def _describe(self, deadline: Deadline) -> LayoutReport:
        """What this rank needs; every failure becomes a fault that all ranks will show."""
        if self.info.engine_size % self._target.size:
            return LayoutReport(
                layout=None,
                faults=(
                    f"this engine has {self._target.size} ranks, the trainer was told "
                    f"{self.info.engine_size}",
                ),
            )
        try:
            raw = self.board.get(f"{self._prefix}/specs", deadline)
            specs = decode(raw, tuple[TensorSpec, ...])
            installer = self._target.installer(specs, self.info.install)
        except ReshardError as error:
            return LayoutReport(layout=None, faults=error.faults or (str(error),))
        except Exception as error:
            logger.exception("reshard: describing engine rank %d failed", self._target.rank)
            return LayoutReport(layout=None, faults=(f"{type(error).__name__}: {error}",))
        if installer.faults:
            return LayoutReport(layout=None, faults=tuple(installer.faults))
        bound = self.info.buffer_bytes
        if bound is not None and installer.staging_bytes > bound:
            return LayoutReport(
                layout=None,
                faults=(
                    f"layers that vLLM repacks take {installer.staging_bytes} bytes beside the "
                    f"weights; buffer_bytes allows {bound}",
                ),
            )
        self.installer = installer
        return LayoutReport(
            layout=CompactSide.of_rank(RankLayout(self.rank, installer.needs())),
            classes=installer.classes,
            staging_bytes=installer.staging_bytes,
            host=host_identity(),
            notes=tuple(installer.notes),
        )

    def trainer_answers(self) -> bool:
        """Whether the trainer that opened this session still serves its board."""
        try:
            # A part of the time that the next trainer gives this rank to join.
            seconds = min(_PROBE_SECONDS, self.info.deadline_seconds / 3)
            self.board.peek(f"{self._prefix}/specs", Deadline.after(seconds))
        except ReshardError:
            return False
        return True

    def report_fault(self, phase: str, text: str) -> None:
        """Write a failure down, unless another came first: it ends every rank's wait."""
        fault = Fault(rank=self.rank, phase=phase, text=text)
        report_fault(self.board, self._prefix, fault, Deadline.after(_PROBE_SECONDS))

    def report_commit(self, commit: CommitInfo, error: str, seconds: dict[str, float]) -> None:
        """Put the outcome of a commit on the board."""
        prefix = attempt_scope(self.info.engine, self.info.epoch, commit.attempt)
        result = RankResult(error=error, seconds=seconds)
        self.board.put(f"{prefix}/committed{commit.trial}/{self.rank}", encode(result))

    def close(self) -> None:
        """Drop the group, waking whoever waits on it, and the connection to the board."""
        if self.group is not None:
            self.group.abort()
            self.group = None
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None
        self.board.close()

    def places(self, move: Move) -> Sequence[tuple[Region, torch.Tensor]]:
        """Where this rank puts the elements of a move."""
        assert self.installer is not None
        return self.installer.write(move.name, move.wire_dtype, move.region)


def _nothing_to_read(move: Move) -> Sequence[tuple[Region, torch.Tensor]]:
    raise ReshardError(f"an engine rank was asked to send {move.name}")
