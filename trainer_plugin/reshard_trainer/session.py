"""A trainer rank's open session with one engine: the plan, the group, the exchanges.

Not here: who opens it and when (`link.py`), the engine's control calls (`pilot.py`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from reshard.agreement import agree, gather
from reshard.board import BoardClient, Deadline
from reshard.errors import DigestMismatch, PeerError, ReshardError
from reshard.hosts import host_identity
from reshard.ids import GroupRank, PolicyVersion
from reshard.joining import Joined, join
from reshard.layout.compact import CompactSide
from reshard.layout.holding import RankLayout
from reshard.layout.region import Region
from reshard.plan import Move
from reshard.session import ConnectInfo, LayoutReport, RankResult, Share, attempt_scope, scope
from reshard.transport.bounds import Bound
from reshard.transport.choice import MixedExchange, open_exchange
from reshard.transport.group import RefitGroup, open_group
from reshard.transport.stored import StoredExchange
from reshard.verification import digest_moves, mismatches
from reshard.wire import decode, encode
from reshard_trainer.kept import Kept
from reshard_trainer.reports import EngineReport
from reshard_trainer.sources import WeightSource, views

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
        share: what readers on this host see.
        keeps: whether what the weights themselves would be read for is copied first.
    """

    info: ConnectInfo
    joined: Joined
    board: BoardClient
    group: RefitGroup
    rank: GroupRank
    source: WeightSource
    share: Share
    keeps: bool = False
    _kept: Kept | None = field(default=None, init=False)
    _exchange: MixedExchange | StoredExchange | None = field(default=None, init=False)
    _moves: int = field(default=-1, init=False)
    _reads_kept: bool = field(default=False, init=False)

    def stage(self, attempt: int, deadline: Deadline) -> bool:
        """Show the present values to readers on this host.

        Returns:
            whether the weights may change before `exchange` has called `release`.

        Raises:
            ReshardError: this rank failed; the others are told.
        """
        exchange = self.prepare()
        exchange.stage(deadline, attempt)
        if exchange.snapshots and not self.info.verifies(attempt):
            return True
        if not self.keeps:
            return False
        if self._kept is None:
            sends = self.joined.plan.for_rank(self.rank).sends
            moves = [move for each in sends.values() for move in each]
            self._kept = Kept(moves, self._weights, self.source.device)
        self._kept.refresh()
        self._reads_kept = True
        return True

    def exchange(self, attempt: int, deadline: Deadline, release: Callable[[], None]) -> Results:
        """Send this rank's staged part, and hear how it went on every rank.

        Args:
            attempt: number of the refit.
            deadline: for the bytes.
            release: called once this rank's weights may change.

        Raises:
            ReshardError: it failed somewhere; lists every rank's error.
        """
        try:
            own = self._run_exchange(attempt, deadline)
        finally:
            self._reads_kept = False
            release()
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
        results = {
            r: decode(raw, RankResult, sender=self.group.name(r)) for r, raw in answers.items()
        }
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
            extra_bytes=tuple(results[rank].extra_bytes for rank in sorted(results)),
            redundancy=self.joined.plan.redundancy,
            direct_bytes=sum(each.direct for each in classes),
            repacked_bytes=sum(each.repacked for each in classes),
            computed_bytes=sum(each.computed for each in classes),
            plan_digest=self.joined.plan.digest,
            notes=self.joined.world.notes,
        )

    def close(self) -> None:
        """Drop the group. After a failure its fault stands on the board and wakes all peers."""
        self.group.close()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        self._kept = None

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

    def prepare(self) -> MixedExchange | StoredExchange:
        """The session's exchange; another where storages have moved."""
        if self.info.stored is not None:
            plan = self.joined.plan.for_rank(self.rank)
            self._exchange = StoredExchange(self.info.stored, plan, _nothing_to_write)
        elif self._exchange is None or self._moves != self.source.moves:
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
                share=self.share,
                bound=Bound(self.info.buffer_bytes, self.joined.plan.sent_bytes),
            )
            self._moves = self.source.moves
            self._kept = None
        return self._exchange

    def _run_exchange(self, attempt: int, deadline: Deadline) -> RankResult:
        assert self._exchange is not None
        try:
            report = self._exchange.complete(deadline, attempt)
        except ReshardError as error:
            return RankResult(error=str(error))
        digests = {}
        seconds = dict(report.seconds)
        if self.info.verifies(attempt):
            start = time.perf_counter()
            digests = digest_moves(self.joined.plan.for_rank(self.rank).sends, self._read)
            seconds["verify"] = time.perf_counter() - start
        return RankResult(
            seconds=seconds,
            nbytes=sum(report.sent_bytes.values()),
            extra_bytes=report.peak_extra_bytes + (self._kept.nbytes if self._kept else 0),
            digests=digests,
        )

    def _read(self, move: Move) -> list[tuple[Region, torch.Tensor]]:
        if self._reads_kept:
            assert self._kept is not None
            return self._kept.read(move)
        return self._weights(move)

    def _weights(self, move: Move) -> list[tuple[Region, torch.Tensor]]:
        return views(self.source, move.name, move.region)


def open_session(
    board: BoardClient,
    info: ConnectInfo,
    rank: GroupRank,
    source: WeightSource,
    share: Share,
    deadline: Deadline,
    *,
    keeps: bool = False,
) -> Session:
    """Describe this rank, share the plan, open the group; all trainer ranks succeed, or none.

    Raises:
        ReshardError: as of `join`, `open_group` and `agree`.
    """
    prefix = scope(info.engine, info.epoch)
    report = LayoutReport(
        CompactSide.of_rank(RankLayout(rank, source.layout())), host=host_identity()
    )
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
    session = Session(info, joined, board, group, rank, source, share, keeps)
    try:
        # Touches no memory yet, but finds out what this transport cannot do.
        session.prepare()
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
        session.close()
        raise
    return session


def _nothing_to_write(move: Move) -> list[tuple[Region, torch.Tensor]]:
    raise ReshardError(f"a trainer rank was asked to receive {move.name}")
