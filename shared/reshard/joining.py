"""Joining a session: describe -> plan -> check, the same code on trainer and engine ranks.

Each rank reports what it holds or needs; trainer rank 0 merges the reports; every rank builds the
plan from the merged world, and all agree on its digest before any group is made or byte moves.
Not here: how a rank knows its layout, and the transfer itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from reshard.agreement import fault_error, gather
from reshard.board import BoardClient, Deadline
from reshard.errors import DeadlineExceeded, DigestMismatch, PlanError
from reshard.ids import GroupRank
from reshard.layout.holding import RankLayout
from reshard.plan import TransferPlan, make_plan
from reshard.session import ClassBytes, ConnectInfo, LayoutReport, scope
from reshard.wire import decode, encode


class World(msgspec.Struct, frozen=True):
    """Every rank's report, merged by trainer rank 0 (key `world`).

    Attributes:
        layouts: by group rank; empty if there are faults.
        faults: all ranks' faults, each prefixed by its rank.
        classes: of each engine rank, bytes by class of destination.
        hosts: by group rank: identity of the machine.
    """

    layouts: tuple[RankLayout, ...]
    faults: tuple[str, ...]
    classes: tuple[ClassBytes, ...]
    hosts: tuple[str, ...]


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
    plan = make_plan(world.layouts[: session.trainer_size], world.layouts[session.trainer_size :])
    _agree_on_digest(board, session, rank, plan.digest, deadline)
    return Joined(plan, world)


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
        world = _merge(session, [decode(raw, LayoutReport) for raw in reports.values()])
        board.put(f"{prefix}/world", encode(world), deadline)
        return world
    board.put(f"{prefix}/layout/{rank}", encode(report), deadline)
    fault = f"{prefix}/fault"
    found = board.get_all((f"{prefix}/world",), deadline, unless=fault)
    if not found.missing:
        return decode(found.values[f"{prefix}/world"], World)
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
            (f"{_who(session, r)}: {raw.decode()}" for r, raw in sorted(digests.items())),
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
    layouts = tuple(report.layout for report in reports if report.layout is not None)
    return World(
        layouts=() if faults else layouts,
        faults=faults,
        classes=tuple(report.classes for report in reports[session.trainer_size :]),
        hosts=tuple(report.host for report in reports),
    )


def _who(session: ConnectInfo, rank: int) -> str:
    if rank < session.trainer_size:
        return f"trainer rank {rank}"
    return f"engine rank {rank - session.trainer_size}"
