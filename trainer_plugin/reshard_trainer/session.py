"""A trainer rank's open session with one engine: the plan, the group, the exchanges.

Not here: who opens it and when (`link.py`), the engine's control calls (`pilot.py`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from reshard.agreement import agree, gather
from reshard.board import BoardClient, Deadline
from reshard.errors import DigestMismatch, PeerError, ReshardError
from reshard.hosts import host_identity
from reshard.ids import GroupRank, PolicyVersion
from reshard.joining import Joined, join
from reshard.layout.holding import RankLayout
from reshard.layout.region import Region
from reshard.plan import Move
from reshard.session import ConnectInfo, LayoutReport, RankResult, attempt_scope, scope
from reshard.transport.choice import MixedExchange, open_exchange
from reshard.transport.group import RefitGroup, open_group
from reshard.verification import digest_moves, mismatches
from reshard.wire import decode, encode
from reshard_trainer.reports import EngineReport
from reshard_trainer.sources import WeightSource

_RESULT_SECONDS = 5.0
"""How long ranks tell each other how an exchange went whose deadline has passed."""

Results = Mapping[int, RankResult]
"""How an exchange went, by group rank; all went well."""


@dataclass(slots=True)
class Session:
    """One epoch, all ranks joined.

    Attributes:
        info: as announced to the engine.
        joined: the plan that all ranks share.
        board: the run's control board.
        group: private, between trainer and engine.
        rank: of this process.
        source: this rank's weights.
    """

    info: ConnectInfo
    joined: Joined
    board: BoardClient
    group: RefitGroup
    rank: GroupRank
    source: WeightSource
    _exchange: MixedExchange | None = field(default=None, init=False)
    _moves: int = field(default=-1, init=False)

    def exchange(self, attempt: int, deadline: Deadline) -> Results:
        """Send this rank's part, and hear how it went on every rank.

        Raises:
            ReshardError: it failed somewhere; lists every rank's error.
        """
        own = self._run_exchange(attempt, deadline)
        info = self.info
        prefix = f"{attempt_scope(info.engine, info.epoch, attempt)}/received"
        ranks = range(info.trainer_size + info.engine_size)
        # A rank that waited in vain still has to say so, and to hear why.
        after = Deadline.after(max(deadline.remaining(), _RESULT_SECONDS))
        try:
            answers = gather(
                self.board,
                prefix,
                self.rank,
                ranks,
                encode(own),
                after,
                trainer_size=info.trainer_size,
            )
        except ReshardError as error:
            raise PeerError(str(error), self._told(prefix, ranks)) from error
        results = {rank: decode(raw, RankResult) for rank, raw in answers.items()}
        if faults := self._faults(results):
            raise PeerError("the new weights did not arrive whole", faults)
        digests = {rank: result.digests for rank, result in results.items()}
        if wrong := mismatches(digests, info.trainer_size):
            raise DigestMismatch(
                "what arrived is not what was sent; nothing was installed",
                (f"from {self.group.name(s)} to {self.group.name(r)}" for s, r in wrong),
            )
        return results

    def report(self, version: PolicyVersion, results: Results) -> EngineReport:
        """The figures of a refit that went well."""
        first = self.info.trainer_size
        seconds: dict[str, float] = {}
        for result in results.values():
            for step, took in result.seconds.items():
                key = f"transfer/{step}"
                seconds[key] = max(took, seconds.get(key, 0.0))
        classes = self.joined.world.classes
        return EngineReport(
            engine=self.info.engine,
            version=version,
            seconds=seconds,
            received_bytes=tuple(
                results[first + rank].nbytes for rank in range(self.info.engine_size)
            ),
            redundancy=self.joined.plan.redundancy,
            direct_bytes=sum(each.direct for each in classes),
            repacked_bytes=sum(each.repacked for each in classes),
            computed_bytes=sum(each.computed for each in classes),
            plan_digest=self.joined.plan.digest,
        )

    def close(self) -> None:
        """Drop the group. After a failure its fault stands on the board and wakes all peers."""
        self.group.close()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _told(self, prefix: str, ranks: Sequence[int]) -> list[str]:
        """The errors of those ranks that have said something."""
        keys = {f"{prefix}/{rank}": rank for rank in ranks}
        try:
            found = self.board.look(tuple(keys), Deadline.after(_RESULT_SECONDS))
        except ReshardError:
            return []
        return self._faults({keys[k]: decode(raw, RankResult) for k, raw in found.values.items()})

    def _faults(self, results: Results) -> list[str]:
        return [
            f"{self.group.name(rank)}: {result.error}"
            for rank, result in sorted(results.items())
            if result.error
        ]

    def _run_exchange(self, attempt: int, deadline: Deadline) -> RankResult:
        if self._exchange is None or self._moves != self.source.moves:
            if self._exchange is not None:
                self._exchange.close()
            self._exchange = open_exchange(
                self.group,
                self.joined.plan.for_rank(self.rank),
                read=self._read,
                write=_nothing_to_write,
                bucket_bytes=self.info.bucket_bytes,
                transport=self.info.transport,
                hosts=self.joined.world.hosts,
            )
            self._moves = self.source.moves
        try:
            report = self._exchange.run(deadline, attempt)
        except ReshardError as error:
            return RankResult(error=str(error))
        digests = {}
        seconds = dict(report.seconds)
        if self.info.verifies(attempt):
            start = time.perf_counter()
            digests = digest_moves(self.joined.plan.for_rank(self.rank).sends, self._read)
            seconds["verify"] = time.perf_counter() - start
        return RankResult(seconds=seconds, nbytes=sum(report.sent_bytes.values()), digests=digests)

    def _read(self, move: Move) -> list[tuple[Region, torch.Tensor]]:
        """The local views that hold a region, without gradients."""
        return [
            (
                piece.region,
                self.source.storage(piece.storage).as_strided(
                    piece.view.shape, piece.view.stride, piece.view.offset
                ),
            )
            for piece in self.source.table.cut(move.name, move.region)
        ]


def open_session(
    board: BoardClient,
    info: ConnectInfo,
    rank: GroupRank,
    source: WeightSource,
    deadline: Deadline,
) -> Session:
    """Describe this rank, share the plan, open the group; all trainer ranks succeed, or none.

    Raises:
        ReshardError: as of `join`, `open_group` and `agree`.
    """
    prefix = scope(info.engine, info.epoch)
    report = LayoutReport(RankLayout(rank, source.layout()), host=host_identity())
    joined = join(board, info, rank, report, deadline)
    group = open_group(
        board,
        f"{prefix}/group",
        rank,
        info.trainer_size + info.engine_size,
        source.device,
        info.host,
        deadline,
        trainer_size=info.trainer_size,
    )
    try:
        agree(
            board,
            f"{prefix}/opened",
            rank,
            range(info.trainer_size),
            None,
            deadline,
            trainer_size=info.trainer_size,
        )
    except BaseException:
        group.close()
        raise
    return Session(info, joined, board, group, rank, source)


def _nothing_to_write(move: Move) -> list[tuple[Region, torch.Tensor]]:
    raise ReshardError(f"a trainer rank was asked to receive {move.name}")
