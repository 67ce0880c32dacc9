"""Processes of the session tests: default groups, several sessions, shared memory, networks."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from tests.multiprocess.transport.workers import (
    join,
    nowhere,
    one_big_world,
    until_it_fails,
)
from tests.multiprocess.transport.worlds import (
    Tensor,
    World,
    destinations,
    locate,
    mismatches,
    random_world,
    sources,
)
from tests.support.networks import enter_network

from reshard.board import BoardClient, BoardServer, Deadline, Invitation
from reshard.errors import ReshardError
from reshard.ids import GroupRank
from reshard.layout.region import Region
from reshard.plan import Move
from reshard.session import Share
from reshard.transport.exchange import Exchange
from reshard.transport.group import RefitGroup, open_group
from reshard.transport.shm import ShmExchange, _Attached


def refit_once(
    group: RefitGroup, world: World, attempt: int = 1, seed: int = 0, seconds: float = 30
) -> list[str]:
    """One exchange over the group; what arrived wrong."""
    rank = int(group.rank)
    trainer = rank < world.trainers
    store = sources(world, rank, seed) if trainer else destinations(world, rank, seed)
    exchange = Exchange(
        group,
        world.plan().for_rank(group.rank),
        read=locate(store) if trainer else nowhere,
        write=nowhere if trainer else locate(store),
        bucket_bytes=1024,
    )
    exchange.run(Deadline.after(seconds), attempt)
    return [] if trainer else mismatches(world, rank, store)


def beside_a_default_group(
    invitation: Invitation, rank: int, path: str, bound: bool
) -> tuple[list[str], float, int]:
    """A refit in a process whose default group has other members; then use the default group."""
    # Trainer ranks 0 and 1 have one default group, engine ranks 2 and 3 another.
    meeting = f"file://{path}.{rank // 2}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank % 2, world_size=2)
    default = dist.group.WORLD
    assert default is not None
    # As if bound to a GPU, which sends torch's own ways of making groups down another path.
    device = torch.device("cuda", 0) if bound else None
    default.bound_device_id = device
    known = len(dist.distributed_c10d._world.pg_map)
    group = join(invitation, "engine/e1", rank, 2, 4, 30)
    wrong = refit_once(group, random_world(5, 2, 2))
    if dist.group.WORLD is not default or len(dist.distributed_c10d._world.pg_map) != known:
        wrong.append("the default group or its registry changed")
    if default.bound_device_id != device:
        wrong.append("the default group is bound to something else")
    default.bound_device_id = None
    group.close()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    dist.barrier()
    size = dist.get_world_size()
    dist.destroy_process_group()
    group.board.close()
    return wrong, float(total), size


def two_sessions_at_once(invitation: Invitation, rank: int) -> list[str]:
    """The same process refits two engines from two threads."""
    wrong: list[str] = []

    def one(engine: int) -> None:
        group = join(invitation, f"engine{engine}/e1", rank, 2, 4, 30)
        for attempt in range(1, 6):
            world = random_world(10 * engine + attempt, 2, 2)
            wrong.extend(refit_once(group, world, attempt))
        group.close()
        group.board.close()

    threads = [threading.Thread(target=one, args=(engine,)) for engine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        if thread.is_alive():
            wrong.append("a session hangs")
    return wrong


def meet(
    invitation: Invitation, rank: int, size: int, host: str | None, seconds: float
) -> list[str] | str:
    """Open a group on `host` and refit once; the text of the error, if any."""
    with BoardClient(invitation, Deadline.after(30)) as board:
        try:
            group = open_group(
                board,
                "engine/e1/group",
                GroupRank(rank),
                size,
                torch.device("cpu"),
                host,
                Deadline.after(seconds),
                trainer_size=2,
            )
            return refit_once(group, random_world(3, 2, 2))
        except ReshardError as error:
            return f"{type(error).__name__}: {error}"


def buckets_differ(invitation: Invitation, rank: int) -> tuple[str, str]:
    """The engine cuts its messages to another size than the trainer."""
    world = random_world(1, 1, 1)
    group = join(invitation, "engine/e1", rank, 1, 2, 30)
    store = sources(world, rank, 0) if rank == 0 else destinations(world, rank, 0)
    exchange = Exchange(
        group,
        world.plan().for_rank(GroupRank(rank)),
        read=locate(store),
        write=locate(store),
        bucket_bytes=64 if rank == 0 else 128,
    )
    try:
        exchange.run(Deadline.after(30), 1)
    except ReshardError as error:
        return type(error).__name__, str(error)
    return "", ""


def sabotaged(invitation: Invitation, rank: int, kind: str) -> list[str]:
    """A refit in which the sender reads wrong elements: the oracle has to see it."""
    world = one_big_world(64 * 64)
    group = join(invitation, "engine/e1", rank, 2, 4, 30)
    plan = world.plan().for_rank(GroupRank(rank))
    store = sources(world, rank, 0) if rank < 2 else destinations(world, rank, 0)
    places = locate(store)

    def swapped(move: Move) -> list[tuple[Region, torch.Tensor]]:
        return [(region, view.flip(0)) for region, view in places(move)]

    read = nowhere if rank >= 2 else (swapped if rank == 1 else places)
    write = places if rank >= 2 else nowhere
    if kind == "shm":
        ShmExchange(group, plan, read, write).run(Deadline.after(30), 1)
    else:
        Exchange(group, plan, read, write, 1024).run(Deadline.after(30), 1)
    return [] if rank < 2 else mismatches(world, rank, store)


def memory_of_a_refit(invitation: Invitation, rank: int) -> tuple[int, int, list[str]]:
    """A tensor of 1 MiB through buckets of 1 KiB: extra bytes, messages, what arrived wrong."""
    world = one_big_world(2**18)
    group = join(invitation, "engine/e1", rank, 2, 4, 30)
    store = sources(world, rank, 0) if rank < 2 else destinations(world, rank, 0)
    exchange = Exchange(
        group,
        world.plan().for_rank(GroupRank(rank)),
        read=locate(store) if rank < 2 else nowhere,
        write=nowhere if rank < 2 else locate(store),
        bucket_bytes=1024,
        in_flight=3,
    )
    report = exchange.run(Deadline.after(60), 1)
    wrong = [] if rank < 2 else mismatches(world, rank, store)
    return report.peak_extra_bytes, report.messages, wrong


def shm_until_it_fails(
    invitation: Invitation, rank: int, seconds: float, share: Share
) -> tuple[str, str, float]:
    """Refit through shared memory again and again; the error that ended it."""
    world = one_big_world(64 * 1024)
    group = join(invitation, "engine/e1", rank, 2, 4, 30)
    store = sources(world, rank, 0) if rank < 2 else destinations(world, rank, 0)
    exchange = ShmExchange(
        group,
        world.plan().for_rank(GroupRank(rank)),
        read=locate(store) if rank < 2 else nowhere,
        write=nowhere if rank < 2 else locate(store),
        share=share,
    )
    return until_it_fails(exchange, seconds, lambda: group.board.put(f"engine/e1/busy/{rank}", b""))


def slow_reader(invitation: Invitation, rank: int, share: Share) -> tuple[str, str]:
    """Rank 1 is slow on purpose while it reads; rank 0 gives up on it and changes its weights."""
    world = one_to_one_world()
    group = join(invitation, "engine/e1", rank, 1, 2, 30)
    store = sources(world, rank, 0) if rank == 0 else destinations(world, rank, 0)
    exchange = ShmExchange(
        group,
        world.plan().for_rank(GroupRank(rank)),
        read=locate(store) if rank == 0 else nowhere,
        write=nowhere if rank == 0 else locate(store),
        share=share,
    )
    if rank == 1:
        _slow_down(exchange, group)
    try:
        exchange.run(Deadline.after(1 if rank == 0 else 30), 1)
    except ReshardError as error:
        if rank == 0:
            store["big"][0][1].zero_()
            group.board.put("engine/e1/changed", b"")
        return type(error).__name__, str(error)
    return "", ""


def _slow_down(exchange: ShmExchange, group: RefitGroup) -> None:
    """Hold the copy up until the sender has changed its weights."""
    attach = exchange._attach

    def attached(sender: int, serial: str, deadline: Deadline) -> _Attached:
        source = attach(sender, serial, deadline)
        run = source.copies.run

        def late() -> None:
            group.board.get("engine/e1/changed", Deadline.after(20))
            run()

        source.copies.run = late  # type: ignore[method-assign]
        return source

    exchange._attach = attached  # type: ignore[method-assign]


def one_to_one_world() -> World:
    """One tensor, from rank 0 to rank 1."""
    whole = [Region((0, 0), (64, 64))]
    tensor = Tensor("big", 0, (64, 64), "float32", "float32", {0: whole}, {1: whole})
    return World(1, 1, [tensor])


def served_by_rank_0(
    rank: int, path: str, host: str, networks: Sequence[str], seconds: float
) -> tuple[str, str, float]:
    """As in a real run, the board lives in trainer rank 0; refit until it fails.

    Args:
        rank: of four: two trainer ranks, two engine ranks.
        path: a folder in which the processes find each other.
        host: on which the board listens.
        networks: network namespaces of the two sides; none: this one.
        seconds: deadline of an attempt.
    """
    if networks:
        enter_network(networks[rank // 2])
    where = Path(path)
    server = BoardServer(host) if rank == 0 else None
    if server is not None:
        (where / "draft").write_bytes(msgspec.json.encode(server.invitation))
        (where / "draft").rename(where / "invitation")
    while not (where / "invitation").exists():
        time.sleep(0.01)
    invitation = msgspec.json.decode((where / "invitation").read_bytes(), type=Invitation)
    world = one_big_world(64 * 1024)
    group = join(invitation, "engine/e1", rank, 2, 4, 30)
    store = sources(world, rank, 0) if rank < 2 else destinations(world, rank, 0)
    exchange = Exchange(
        group,
        world.plan().for_rank(GroupRank(rank)),
        read=locate(store) if rank < 2 else nowhere,
        write=nowhere if rank < 2 else locate(store),
        bucket_bytes=4096,
    )
    return until_it_fails(exchange, seconds, (where / f"busy{rank}").touch)


def rebuilt_without(
    invitation: Invitation, rank: int, gone: int, seeds: Sequence[int]
) -> tuple[str, list[str]]:
    """After a failure, the survivors open the next session, one rank fewer, and refit."""
    first = join(invitation, "engine/e1", rank, 2, 4, 30)
    world = one_big_world(64 * 256)
    if rank == gone:
        os.kill(os.getpid(), 9)
    try:
        refit_once(first, world, seconds=3)
        return "no failure", []
    except ReshardError as error:
        text = str(error)
    wrong: list[str] = []
    second = join(invitation, "engine/e2", rank, 2, 3, 30)
    for attempt, seed in enumerate(seeds, start=1):
        wrong += refit_once(second, random_world(seed, 2, 1), attempt, seed)
    return text, wrong


def soak(invitation: Invitation, rank: int, kind: str, refits: int) -> dict[str, list[int]]:
    """Refit many times; what the process holds after a fifth of them, and at the end."""
    world = random_world(7, 2, 2)
    group = join(invitation, "engine/e1", rank, 2, 4, 30)
    plan = world.plan().for_rank(GroupRank(rank))
    store = sources(world, rank, 0) if rank < 2 else destinations(world, rank, 0)
    read = locate(store) if rank < 2 else nowhere
    write = nowhere if rank < 2 else locate(store)
    exchange: Exchange | ShmExchange = (
        ShmExchange(group, plan, read, write)
        if kind == "shm"
        else Exchange(group, plan, read, write, 512)
    )
    held: dict[str, list[int]] = {"files": [], "threads": [], "mappings": [], "extra": []}
    for attempt in range(1, refits + 1):
        report = exchange.run(Deadline.after(30), attempt)
        if attempt in (refits // 5, refits):
            held["files"].append(len(list(Path("/proc/self/fd").iterdir())))
            held["threads"].append(threading.active_count())
            held["mappings"].append(Path("/proc/self/maps").read_text().count("reshard-"))
            held["extra"].append(report.peak_extra_bytes)
    return held


def refit_on_gpus(invitation: Invitation, rank: int, seeds: Sequence[int]) -> list[str]:
    """NCCL between two GPUs, one a trainer rank and one an engine rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with BoardClient(invitation, Deadline.after(60)) as board:
        group = open_group(
            board, "engine/e1/group", GroupRank(rank), 2, device, None, Deadline.after(120)
        )
        wrong: list[str] = []
        for attempt, seed in enumerate(seeds, start=1):
            world = random_world(seed, 1, 1)
            plain = sources(world, rank, seed) if rank == 0 else destinations(world, rank, seed)
            store = {
                name: [(region, view.to(device)) for region, view in pieces]
                for name, pieces in plain.items()
            }
            exchange = Exchange(
                group,
                world.plan().for_rank(GroupRank(rank)),
                read=locate(store) if rank == 0 else nowhere,
                write=nowhere if rank == 0 else locate(store),
                bucket_bytes=1024,
            )
            exchange.run(Deadline.after(60), attempt)
            if rank == 1:
                for name, pieces in store.items():
                    for (_, view), (_, there) in zip(plain[name], pieces, strict=True):
                        view.copy_(there.cpu())
                wrong += mismatches(world, rank, plain)
        group.close()
    return wrong
