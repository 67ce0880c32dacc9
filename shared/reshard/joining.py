"""Joining a session: describe -> plan -> check, the same code on trainer and engine ranks.

Each rank reports what it holds or needs; trainer rank 0 merges the reports, so that what ranks or
tensors have in common travels once; every rank builds the plan from the merged world, and all agree
on its digest before any group is made or byte moves. Not here: how a rank knows its layout, and the
transfer itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from reshard.agreement import fault_error, gather
from reshard.board import BoardClient, Deadline
from reshard.errors import DeadlineExceeded, DigestMismatch, PlanError
from reshard.ids import FQN, GroupRank
from reshard.layout.compact import CompactSide, expand
from reshard.layout.side import Gathered
from reshard.plan import TransferPlan, make_plan
from reshard.plan.cache import PlanCache
from reshard.session import ClassBytes, ConnectInfo, LayoutReport, scope
from reshard.wire import decode, encode


class World(msgspec.Struct, frozen=True):
    """Every rank's report, merged by trainer rank 0 (key `world`).

    Attributes:
        layouts: of both sides (`Layouts`), encoded; empty if there are faults. Equal layouts are
            equal bytes, so they tell whether a plan is at hand.
        faults: all ranks' faults, each prefixed by its rank.
        classes: of each engine rank, bytes by class of destination.
        hosts: by group rank: identity of the machine.
        staging_bytes: by engine rank: memory that a refit takes there beside the weights.
        notes: of all engine ranks, each once.
    """

    layouts: bytes
    faults: tuple[str, ...]
    classes: tuple[ClassBytes, ...]
    hosts: tuple[str, ...]
    staging_bytes: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


class SentSide(msgspec.Struct, frozen=True):
    """What all ranks of one side hold or need.

    Attributes:
        layout: what fits together.
        faults: by tensor: what does not.
    """

    layout: CompactSide
    faults: dict[FQN, str]


class Layouts(msgspec.Struct, frozen=True):
    """Both sides, merged from all reports."""

    source: SentSide
    destination: SentSide


PLANS: Final = PlanCache()
"""The plans of this process."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The outcome of joining: the same on every rank.

    Attributes:
        plan: who sends what to whom; its digest is equal on every rank.
        world: what every rank reported.
    """

    plan: TransferPlan
    world: World


def join(
    board: BoardClient,
    session: ConnectInfo,
    rank: GroupRank,
    report: LayoutReport,
    deadline: Deadline,
) -> Joined:
    """Report this rank's layout and build the plan that all ranks share.

    Args:
        board: the run's control board.
        session: which session; the same on every rank.
        rank: this rank.
        report: what this rank holds or needs, or its faults.
        deadline: for the whole of it.

    Raises:
        PlanError: some rank has faults, or the layouts cannot be joined; the same text everywhere.
        DigestMismatch: ranks built different plans.
        PeerError: another rank failed (the session has a fault).
        DeadlineExceeded: names the ranks that did not report.
    """
    world = _world(board, session, rank, report, deadline)
    if world.faults:
        raise PlanError(
            f"trainer and engine {session.engine} cannot be joined; nothing was sent, the engine "
            "serves its old weights",
            world.faults,
        )
    plan = PLANS.plan(world.layouts, lambda: plan_from(world.layouts))
    _agree_on_digest(board, session, rank, plan.digest, deadline)
    return Joined(plan, world)


def plan_from(layouts: bytes) -> TransferPlan:
    """The plan for the layouts of a world.

    Raises:
        PlanError: the layouts cannot be joined.
    """
    sides = decode(layouts, Layouts)
    return make_plan(_gathered(sides.source), _gathered(sides.destination))


def merge_layouts(sources: Iterable[CompactSide], destinations: Iterable[CompactSide]) -> bytes:
    """The reports of all ranks as the layouts of a world.

    Raises:
        LayoutError: a malformed report.
    """
    return encode(Layouts(_sent(sources), _sent(destinations)))


def _sent(reports: Iterable[CompactSide]) -> SentSide:
    gathered = expand(reports)
    return SentSide(CompactSide.of_side(gathered.side), dict(gathered.faults))


def _gathered(side: SentSide) -> Gathered:
    return Gathered(expand([side.layout]).side, side.faults)


def _world(
    board: BoardClient,
    session: ConnectInfo,
    rank: GroupRank,
    report: LayoutReport,
    deadline: Deadline,
) -> World:
    """All reports; merged once, by trainer rank 0."""
    prefix = scope(session.engine, session.epoch)
    if rank == 0:
        reports = _gather(board, session, "layout", rank, encode(report), deadline)
        world = _merge(
            session,
            [decode(raw, LayoutReport, sender=_who(session, r)) for r, raw in reports.items()],
        )
        board.put(f"{prefix}/world", encode(world), deadline)
        return world
    board.put(f"{prefix}/layout/{rank}", encode(report), deadline)
    fault = f"{prefix}/fault"
    found = board.get_all((f"{prefix}/world",), deadline, unless=fault)
    if not found.missing:
        return decode(found.values[f"{prefix}/world"], World, sender=_who(session, 0))
    if fault in found.values:
        raise fault_error(found.values[fault], session.trainer_size)
    raise DeadlineExceeded(
        f"no answer from trainer rank 0 in phase layout within {deadline.seconds:g} s"
    )


def _agree_on_digest(
    board: BoardClient, session: ConnectInfo, rank: GroupRank, digest: str, deadline: Deadline
) -> None:
    digests = _gather(board, session, "digest", rank, digest.encode(), deadline)
    if len(set(digests.values())) > 1:
        raise DigestMismatch(
            "ranks built different plans from the same layouts; nothing was sent. Do all processes "
            "run the same version of reshard?",
            (
                f"{_who(session, r)}: {raw.decode(errors='replace')}"
                for r, raw in sorted(digests.items())
            ),
        )


def _gather(
    board: BoardClient,
    session: ConnectInfo,
    step: str,
    rank: GroupRank,
    value: bytes,
    deadline: Deadline,
) -> dict[int, bytes]:
    """All ranks' values, in the order of ranks."""
    return gather(
        board,
        f"{scope(session.engine, session.epoch)}/{step}",
        rank,
        range(session.trainer_size + session.engine_size),
        value,
        deadline,
        trainer_size=session.trainer_size,
    )


def _merge(session: ConnectInfo, reports: Sequence[LayoutReport]) -> World:
    faults = tuple(
        f"{_who(session, rank)}: {fault}"
        for rank, report in enumerate(reports)
        for fault in report.faults
    )
    layouts = [report.layout or CompactSide(()) for report in reports]
    size = session.trainer_size
    return World(
        layouts=b"" if faults else merge_layouts(layouts[:size], layouts[size:]),
        faults=faults,
        classes=tuple(report.classes for report in reports[session.trainer_size :]),
        hosts=tuple(report.host for report in reports),
        staging_bytes=tuple(report.staging_bytes for report in reports[session.trainer_size :]),
        notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
    )


def _who(session: ConnectInfo, rank: int) -> str:
    if rank < session.trainer_size:
        return f"trainer rank {rank}"
    return f"engine rank {rank - session.trainer_size}"
