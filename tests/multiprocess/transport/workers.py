"""What the processes of the transport tests run."""

import os
import signal
import time
from collections.abc import Callable, Sequence

import torch
from tests.multiprocess.transport.worlds import (
    Tensor,
    World,
    destinations,
    locate,
    mismatches,
    random_world,
    sources,
)

from reshard.board import BoardClient, Deadline, Invitation
from reshard.errors import ReshardError
from reshard.ids import GroupRank
from reshard.layout.region import Region
from reshard.plan import Move, RankPlan
from reshard.transport.choice import MixedExchange, open_exchange
from reshard.transport.exchange import Exchange
from reshard.transport.group import RefitGroup, open_group
from reshard.transport.places import Locate
from reshard.transport.report import ExchangeReport
from reshard.transport.rounds import Rounds
from reshard.transport.shm import ShmExchange


def nowhere(move: Move) -> list[tuple[Region, torch.Tensor]]:
    raise ReshardError(f"{move.name} is not here")


def join(
    invitation: Invitation, session: str, rank: int, trainers: int, size: int, seconds: float
) -> RefitGroup:
    torch.set_num_threads(1)
    board = BoardClient(invitation, Deadline.after(seconds))
    return open_group(
        board,
        f"{session}/group",
        GroupRank(rank),
        size,
        torch.device("cpu"),
        None,
        Deadline.after(seconds),
        trainer_size=trainers,
    )


class GlooRounds(Exchange):
    """An exchange that runs NCCL's rounds over gloo."""

    def _make_executor(self) -> Rounds:
        return Rounds(self._group, self._schedule, self._read, self._write, self._in_flight)


def _exchange(
    kind: str, group: RefitGroup, plan: RankPlan, read: Locate, write: Locate, seed: int
) -> Exchange | ShmExchange | MixedExchange:
    bucket_bytes, in_flight = [64, 1024, 2**20][seed % 3], 1 + seed % 3
    match kind:
        case "windows":
            return Exchange(group, plan, read, write, bucket_bytes, in_flight=in_flight)
        case "rounds":
            return GlooRounds(group, plan, read, write, bucket_bytes, in_flight=in_flight)
        case "snapshot":
            return ShmExchange(group, plan, read, write)
        case "live":
            return ShmExchange(group, plan, read, write, share="live")
    # Two hosts: even and odd ranks.
    hosts = [f"host{rank % 2}" for rank in range(group.size)]
    return open_exchange(
        group, plan, read, write, bucket_bytes, transport="auto", hosts=hosts, in_flight=in_flight
    )


def refit_worlds(
    invitation: Invitation,
    session: str,
    rank: int,
    trainers: int,
    engines: int,
    seeds: Sequence[int],
    kind: str,
) -> list[str]:
    """Make the transfers of several random worlds on one group; what arrived wrong."""
    group = join(invitation, session, rank, trainers, trainers + engines, 30)
    wrong: list[str] = []
    for attempt, seed in enumerate(seeds, start=1):
        world = random_world(seed, trainers, engines)
        plan = world.plan().for_rank(GroupRank(rank))
        trainer = rank < trainers
        store = sources(world, rank, seed) if trainer else destinations(world, rank, seed)
        read = locate(store) if trainer else nowhere
        write = nowhere if trainer else locate(store)
        exchange = _exchange(kind, group, plan, read, write, seed)
        report = exchange.run(Deadline.after(30), attempt)
        if not trainer:
            wrong += [f"seed {seed}: {each}" for each in mismatches(world, rank, store)]
            expected = {int(p): sum(m.nbytes for m in ms) for p, ms in plan.receives.items()}
            got = dict(report.received_bytes)
            # Padding between dtypes is all that a message may hold beside its moves.
            if any(got.get(p, 0) < n for p, n in expected.items()):
                wrong.append(f"seed {seed}: reported {got}, planned {expected}")
    group.close()
    group.board.close()
    return wrong


def one_big_world(elements: int) -> World:
    """Rank 0 and 1 hold halves of one tensor by rows; each engine rank needs half its columns."""
    rows, columns = elements // 64, 64
    held = {r: [Region((r * rows // 2, 0), (rows // 2, columns))] for r in range(2)}
    needed = {2 + r: [Region((0, r * columns // 2), (rows, columns // 2))] for r in range(2)}
    tensor = Tensor("big", 0, (rows, columns), "float32", "float32", held, needed)
    return World(2, 2, [tensor])


def refit_until_it_fails(
    invitation: Invitation, session: str, rank: int, seconds: float, trouble: str
) -> tuple[str, str, float]:
    """Refit again and again; the error that ended it, and how long the last attempt took.

    Args:
        trouble: what rank 1 does: `killed`, `stopped` (by the test), `raises`, `late`
            (never comes to a refit), `dies` (is killed before it comes).
    """
    world = one_big_world(64 * 1024)
    group = join(invitation, session, rank, 2, 4, 30)
    store = sources(world, rank, 0) if rank < 2 else destinations(world, rank, 0)
    read = locate(store) if rank < 2 else nowhere

    def failing(move: Move) -> list[tuple[Region, torch.Tensor]]:
        raise ValueError("out of luck")

    exchange = Exchange(
        group,
        world.plan().for_rank(GroupRank(rank)),
        read=failing if (rank, trouble) == (1, "raises") else read,
        write=nowhere if rank < 2 else locate(store),
        bucket_bytes=4096,
    )
    if rank == 1 and trouble in ("late", "dies"):
        run = exchange.run

        def late(deadline: Deadline, attempt: int) -> ExchangeReport:
            if attempt == 3 and trouble == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if attempt == 3:
                time.sleep(3600)
            return run(deadline, attempt)

        exchange.run = late  # type: ignore[method-assign]
    outcome = until_it_fails(
        exchange, seconds, lambda: group.board.put(f"{session}/busy/{rank}", b"")
    )
    group.close()
    group.board.close()
    return outcome


def until_it_fails(
    exchange: Exchange | ShmExchange, seconds: float, busy: Callable[[], object]
) -> tuple[str, str, float]:
    """Refit again and again; the error that ended it, and how long the last attempt took.

    Args:
        exchange: what to run.
        seconds: deadline of an attempt.
        busy: called once the refits are going.
    """
    attempt = 0
    while True:
        attempt += 1
        if attempt == 3:
            busy()
        start = time.monotonic()
        try:
            exchange.run(Deadline.after(seconds), attempt)
        except ReshardError as error:
            return type(error).__name__, str(error), time.monotonic() - start
