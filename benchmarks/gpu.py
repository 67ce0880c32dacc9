"""Refits between GPUs over NCCL, against plain copies on a GPU. Run as `python -m benchmarks.gpu`.

Half of the devices train (fp32, rows), the other half serve (bf16, columns); no engine is started.
It has never run on GPUs; with `--device cpu` the same goes over gloo, which is how it is tested.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal, cast

import click
import torch
from tests.multiprocess.trainer.processes import run_ranks

from reshard.board import BoardClient, BoardServer, Deadline, Invitation
from reshard.errors import ReshardError
from reshard.ids import FQN, GroupRank
from reshard.layout.mesh import Mesh
from reshard.layout.placements import Shard
from reshard.layout.region import Region
from reshard.layout.sharding import Sharding
from reshard.layout.side import SideLayout
from reshard.plan import Move, make_plan
from reshard.transport.exchange import Exchange
from reshard.transport.group import open_group
from reshard.transport.places import Places

Device = Literal["cuda", "cpu"]
_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Task:
    """What is refitted.

    Attributes:
        ranks: of both sides together; even.
        layers: square matrices.
        width: their rows and columns.
        refits: that are timed, after one that is not.
        bucket_bytes: largest message.
        device: where it lies.
    """

    ranks: int
    layers: int
    width: int
    refits: int
    bucket_bytes: int
    device: Device


@dataclass(frozen=True, slots=True)
class Measured:
    """One rank's figures.

    Attributes:
        seconds: median of a refit.
        copy_seconds: median of a plain copy, cast included, of what this rank receives; 0 if it
            receives nothing.
        nbytes: received.
        extra_bytes: at most, beside the weights.
        exact: whether every received element is the sender's.
    """

    seconds: float
    copy_seconds: float
    nbytes: int
    extra_bytes: int
    exact: bool


def measure(rank: int, task: Task, invitation: Invitation) -> Measured:
    """One rank's part."""
    device = torch.device(task.device, rank) if task.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    half, shape = task.ranks // 2, (task.width, task.width)
    names = [FQN(f"layers.{k}.weight") for k in range(task.layers)]
    rows = Sharding(Mesh((half,), tuple(range(half))), (Shard(0),), shape)
    columns = Sharding(Mesh((half,), tuple(range(half, task.ranks))), (Shard(1),), shape)
    plan = make_plan(
        SideLayout.from_shardings([(names, rows, "float32")]),
        SideLayout.from_shardings([(names, columns, "bfloat16")]),
    )
    trains = rank < half
    (region,) = (rows if trains else columns).regions(rank)
    dtype = torch.float32 if trains else torch.bfloat16
    shards = {name: torch.zeros(region.shape, dtype=dtype, device=device) for name in names}
    if trains:
        for number, shard in enumerate(shards.values()):
            shard.copy_(_values(region, task.width, number))

    def place(move: Move) -> Places:
        index = tuple(
            slice(o - base, o - base + n)
            for o, n, base in zip(move.region.offset, move.region.shape, region.offset, strict=True)
        )
        return [(move.region, shards[move.name][index])]

    with BoardClient(invitation, Deadline.after(_SECONDS)) as board:
        at = Deadline.after(_SECONDS)
        group = open_group(
            board, "gpu/e1/group", GroupRank(rank), task.ranks, device, None, at, trainer_size=half
        )
        exchange = Exchange(
            group,
            plan.for_rank(GroupRank(rank)),
            place if trains else _nowhere,
            _nowhere if trains else place,
            task.bucket_bytes,
        )
        seconds = []
        for attempt in range(1, task.refits + 2):
            start = time.perf_counter()
            report = exchange.run(Deadline.after(_SECONDS), attempt)
            seconds.append(time.perf_counter() - start)
        group.close()
    copies = [] if trains else [_copy_seconds(list(shards.values())) for _ in range(task.refits)]
    exact = trains or all(
        torch.equal(shard.cpu(), _values(region, task.width, number).bfloat16())
        for number, shard in enumerate(shards.values())
    )
    return Measured(
        seconds=median(seconds[1:]),
        copy_seconds=median(copies) if copies else 0.0,
        nbytes=sum(report.received_bytes.values()),
        extra_bytes=report.peak_extra_bytes,
        exact=exact,
    )


def _values(region: Region, width: int, number: int) -> torch.Tensor:
    """The elements of a region: each says where it belongs."""
    row = torch.arange(region.offset[0], region.offset[0] + region.shape[0])
    column = torch.arange(region.offset[1], region.offset[1] + region.shape[1])
    return (row[:, None] * width + column + number).float()


def _copy_seconds(shards: list[torch.Tensor]) -> float:
    masters = [shard.float() for shard in shards]
    _synchronize(shards[0].device)
    start = time.perf_counter()
    torch._foreach_copy_(shards, masters)
    _synchronize(shards[0].device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _nowhere(move: Move) -> Places:
    raise ReshardError(f"{move.name}: not on this rank")


@click.command()
@click.option("--device", default="cuda", show_default=True, type=click.Choice(["cuda", "cpu"]))
@click.option("--ranks", type=click.IntRange(2), help="Even; default: all GPUs, 4 on CPUs.")
@click.option("--layers", default=64, show_default=True, type=click.IntRange(1))
@click.option("--width", default=4096, show_default=True, type=click.IntRange(2))
@click.option("--refits", default=10, show_default=True, type=click.IntRange(1))
@click.option("--bucket-mib", default=64, show_default=True, type=click.IntRange(1))
@click.option(
    "--output",
    default="build/bench_gpu.json",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
)
def main(
    device: Device,
    ranks: int | None,
    layers: int,
    width: int,
    refits: int,
    bucket_mib: int,
    output: Path,
) -> None:
    """Refit square matrices between GPUs over NCCL, and compare with plain copies."""
    found = torch.cuda.device_count()
    if device == "cuda" and found < (ranks or 2):
        raise click.ClickException(
            f"needs {ranks or 2} CUDA devices, found {found}: NCCL takes one rank a GPU. Nothing "
            "was measured; --device cpu runs the same over gloo"
        )
    size = ranks or (found // 2 * 2 if device == "cuda" else 4)
    if size % 2:
        raise click.ClickException(f"{size} ranks cannot be halved")
    task = Task(size, layers, width, refits, bucket_mib * 2**20, device)
    with BoardServer() as server:
        results = run_ranks(measure, size, task, server.invitation, seconds=2 * _SECONDS)
    measured = cast(list[Measured], results)
    seconds = max(each.seconds for each in measured)
    copy = max(each.copy_seconds for each in measured)
    output.parent.mkdir(parents=True, exist_ok=True)
    figures = {"task": asdict(task), "ranks": [asdict(each) for each in measured]}
    output.write_text(json.dumps(figures, indent=2) + "\n")
    total = sum(each.nbytes for each in measured)
    click.echo(
        f"{size} ranks on {device}: {total / 1e6:.0f} MB in {seconds:.4f} s; plain copies "
        f"{copy:.4f} s, {copy / seconds:.2f} of that speed; at most "
        f"{max(each.extra_bytes for each in measured) / 1e6:.0f} MB beside the weights; figures: "
        f"{output}"
    )
    if not all(each.exact for each in measured):
        raise click.ClickException("some elements did not arrive as they were sent")


if __name__ == "__main__":
    main()
