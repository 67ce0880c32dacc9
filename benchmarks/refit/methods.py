"""Ways to bring an engine to a trainer's weights: what is measured.

All trainer ranks call each method of a `Method` together; rank 0 talks to the engine.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

import reshard_trainer
from benchmarks.refit.engine_calls import EngineCalls, slowest
from benchmarks.refit.groups import GlooGroup
from reshard.session import Install, Share, Transport
from reshard_trainer.hook import Hook

WIRE = torch.bfloat16
_SETTLE_SECONDS = 1.5
"""For a second after each call vLLM's workers look for the next one without sleeping."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What a trainer rank has to do with.

    Attributes:
        rank, size: of the trainer.
        model: fp32 masters under FSDP2.
        url: of the engine.
        calls: to the engine, on rank 0.
        folder: shared by all processes; holds the engine's checkpoint in `model`.
        shard_bytes: what each engine rank needs.
    """

    rank: int
    size: int
    model: nn.Module
    url: str
    calls: EngineCalls | None
    folder: Path
    shard_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One refit, as one trainer rank saw it.

    Attributes:
        seconds: by phase; `total` until the engine serves the new weights, `trainer stall` until
            the trainer could go on, `engine pause` while it generated nothing.
        received: bytes by engine rank.
    """

    seconds: dict[str, float]
    received: tuple[int, ...] = ()


class Method(Protocol):
    """One way, all trainer ranks together."""

    name: str

    def open(self) -> None:
        """Get ready, as a run does once."""

    def run(self) -> Sample:
        """Bring the engine to the present weights."""

    def close(self) -> None:
        """Leave the engine."""


def full_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter once, gathered and cast, on every rank."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            yield name, parameter.full_tensor().to(WIRE)


class Broadcast:
    """Gather each full tensor, broadcast it to every engine rank, have its loader cut it."""

    def __init__(self, bench: Bench, *, sources: int) -> None:
        """Of trainer rank 0 alone (`sources=1`), or of the first `sources` ranks in turn."""
        self.name = "broadcast" if sources == 1 else "broadcast, all trainer ranks"
        self._bench = bench
        self._sources = sources
        self._group: GlooGroup | None = None
        self._meta = [(name, list(p.shape)) for name, p in bench.model.named_parameters()]

    def open(self) -> None:
        """Open a group a source."""
        bench = self._bench
        (serial,) = _broadcast_object([time.time_ns()])
        folder = bench.folder / f"groups-{serial}"
        folder.mkdir(exist_ok=True)
        size = 1 + len(bench.shard_bytes)
        with ThreadPoolExecutor(1) as pool:
            if bench.calls is not None:
                joined = pool.submit(
                    bench.calls.rpc, "bench_join", folder=str(folder), sources=self._sources
                )
            if bench.rank < self._sources:
                self._group = GlooGroup(str(folder / f"broadcast{bench.rank}"), 0, size)
            if bench.calls is not None:
                joined.result()

    def run(self) -> Sample:
        """One update."""
        bench, calls = self._bench, self._bench.calls
        seconds = {"gather": 0.0, "send": 0.0}
        start = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            if calls is not None:
                paused = time.perf_counter()
                calls.pause()
                receiving = pool.submit(
                    calls.rpc,
                    "bench_receive",
                    tensors=self._meta,
                    dtype=str(WIRE).removeprefix("torch."),
                )
            for number, (_, full) in enumerate(_timed(full_tensors(bench.model), seconds)):
                if number % self._sources == bench.rank and self._group is not None:
                    sending = time.perf_counter()
                    self._group.broadcast(full)
                    seconds["send"] += time.perf_counter() - sending
            seconds["trainer stall"] = time.perf_counter() - start
            if calls is not None:
                seconds |= {f"engine {k}": v for k, v in slowest(receiving.result()).items()}
                calls.resume()
                seconds["engine pause"] = time.perf_counter() - paused
                seconds["total"] = seconds["trainer stall"] = time.perf_counter() - start
        whole = sum(WIRE.itemsize * p.numel() for p in bench.model.parameters())
        return Sample(seconds, (whole,) * len(bench.shard_bytes))

    def close(self) -> None:
        """Drop the group."""
        self._group = None


class Checkpoint:
    """Save safetensors to memory, have the engine reload its weights from there."""

    name = "checkpoint"

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def open(self) -> None:
        """Nothing to prepare."""

    def run(self) -> Sample:
        """Save, and reload."""
        bench, calls = self._bench, self._bench.calls
        start = time.perf_counter()
        seconds = save(bench.model, bench.folder / "model", bench.rank)
        seconds["trainer stall"] = time.perf_counter() - start
        nbytes = (bench.folder / "model" / WEIGHTS).stat().st_size if calls is not None else 0
        if calls is not None:
            paused = time.perf_counter()
            calls.pause()
            calls.rpc("reload_weights")
            seconds["engine load"] = time.perf_counter() - paused
            calls.resume()
            seconds["engine pause"] = time.perf_counter() - paused
            seconds["total"] = time.perf_counter() - start
        return Sample(seconds, (nbytes,) * len(bench.shard_bytes))

    def close(self) -> None:
        """Nothing to leave."""


WEIGHTS = "model.safetensors"


def save(model: nn.Module, folder: Path, rank: int) -> dict[str, float]:
    """Gather and save all weights in the engine's dtype; seconds by phase."""
    seconds = {"gather": 0.0, "save": 0.0}
    full = {name: tensor for name, tensor in _timed(full_tensors(model), seconds) if rank == 0}
    if rank == 0:
        start = time.perf_counter()
        save_file(full, folder / f"{WEIGHTS}.new", metadata={"format": "pt"})
        # Never under a reader's map.
        (folder / f"{WEIGHTS}.new").rename(folder / WEIGHTS)
        seconds["save"] = time.perf_counter() - start
    return seconds


class Limit:
    """Plain copies of what each engine rank needs, in its process: what no method can pass."""

    name = "limit"

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._shard: list[tuple[torch.Tensor, torch.Tensor]] = []

    def open(self) -> None:
        """Make the memory to copy from, and touch that to copy to."""
        if self._bench.calls is not None:
            self._bench.calls.rpc("bench_prepare_limit")
        shards = {p.to_local().data_ptr(): p.to_local() for p in _dtensors(self._bench.model)}
        self._shard = [(each.detach(), each.detach().to(WIRE)) for each in shards.values()]

    def run(self) -> Sample:
        """Copy on the engine's ranks, then on the trainer's."""
        seconds = {}
        if self._bench.calls is not None:
            seconds = slowest(self._bench.calls.rpc("bench_limit"))
            seconds["total"] = seconds["cast"]
            seconds["engine pause"] = seconds["copy"]
            time.sleep(_SETTLE_SECONDS)
        dist.barrier()
        start = time.perf_counter()
        for masters, copy in self._shard:
            copy.copy_(masters)
        seconds["trainer stall"] = time.perf_counter() - start
        return Sample(seconds, self._bench.shard_bytes)

    def close(self) -> None:
        """Give the memory up."""
        self._shard = []
        if self._bench.calls is not None:
            self._bench.calls.rpc("bench_drop_limit")


class Reshard:
    """The product, through its hook."""

    def __init__(self, bench: Bench, transport: Transport, share: Share, install: Install) -> None:
        way = f"shm {share}" if transport == "shm" else transport
        self.name = f"reshard {way}, {install}"
        self._model, self._url = bench.model, bench.url
        self._transport, self._share, self._install = transport, share, install
        self._hook: Hook | None = None
        self._optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.0)

    def open(self) -> None:
        """Attach."""
        self._hook = reshard_trainer.attach(
            self._model,
            self._optimizer,
            [self._url],
            transport=self._transport,
            install=self._install,
            share=self._share,
            overlap=True,
        )

    def run(self) -> Sample:
        """One optimizer step, without gradients: the hook publishes the weights as they are."""
        assert self._hook is not None
        start = time.perf_counter()
        self._optimizer.step()
        stall = time.perf_counter() - start
        report = self._hook.wait()
        total = time.perf_counter() - start
        assert report is not None
        (engine,) = report.engines.values()
        seconds = dict(engine.seconds)
        seconds |= {"trainer stall": stall, "total": total, "engine pause": engine.pause_seconds}
        return Sample(seconds, engine.received_bytes)

    def close(self) -> None:
        """Detach."""
        assert self._hook is not None
        self._hook.close()
        self._hook = None


def methods(bench: Bench) -> list[Method]:
    """All of them, in the order in which they take turns.

    Kinds of install alternate, so that none finds the other's memory ready.
    """
    ways: list[tuple[Transport, Share]] = [
        ("gloo", "snapshot"),
        ("shm", "snapshot"),
        ("shm", "live"),
    ]
    installs: tuple[Install, ...] = ("staged", "in_place")
    return [
        Broadcast(bench, sources=1),
        Broadcast(bench, sources=bench.size),
        Checkpoint(bench),
        *(Reshard(bench, way, share, install) for way, share in ways for install in installs),
        Limit(bench),
    ]


def _dtensors(model: nn.Module) -> Iterator[DTensor]:
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        yield parameter


def _timed(
    tensors: Iterator[tuple[str, torch.Tensor]], seconds: dict[str, float]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, with the time that each takes to come added to `gather`."""
    while True:
        start = time.perf_counter()
        item = next(tensors, None)
        seconds["gather"] += time.perf_counter() - start
        if item is None:
            return
        yield item


def _broadcast_object(values: list[int]) -> list[int]:
    dist.broadcast_object_list(values)
    return values
