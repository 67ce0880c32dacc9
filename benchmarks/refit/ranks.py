"""One trainer rank of the benchmark: all methods in turn, several rounds.

The weights change before every refit, between two versions; after each method vLLM's own checksums
tell whether the engine has the version that it should have.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch.distributed as dist
from tests.multiprocess.trainer.processes import join_default_group

from benchmarks.refit.engine_calls import EngineCalls
from benchmarks.refit.memory import Memory, reset_peak
from benchmarks.refit.methods import Bench, Method, Sample, methods, save
from benchmarks.refit.shapes import Shape, negate, sharded_model

REFITS = 2
"""Timed refits of a method in each round, after one that is not timed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One method's part of one round, on one trainer rank.

    Attributes:
        method: its name.
        samples: one a timed refit.
        extra_bytes: memory beside the weights that this trainer rank had at most.
        engine_extra_bytes: that of each engine rank; on trainer rank 0.
        equal: whether the engine had the right weights afterwards; on trainer rank 0.
        open_seconds: how long it took to get ready.
        shard_bytes: what each engine rank needs.
    """

    method: str
    samples: tuple[Sample, ...]
    extra_bytes: int
    engine_extra_bytes: tuple[int, ...]
    equal: bool
    open_seconds: float
    shard_bytes: tuple[int, ...]


def make_checkpoint(rank: int, size: int, shape: Shape, folder: str) -> None:
    """Save the weights with which the engine starts."""
    join_default_group(rank, size, folder)
    save(sharded_model(shape), Path(folder) / "model", rank)
    dist.destroy_process_group()


def measure(
    rank: int,
    size: int,
    shape: Shape,
    folder: str,
    url: str,
    rounds: int,
    only: tuple[str, ...],
) -> list[Turn]:
    """Take all methods in turn, or those whose names hold one of `only`."""
    Path(folder, "rendezvous").unlink(missing_ok=True)
    join_default_group(rank, size, f"{folder}/second")
    model = sharded_model(shape)
    calls = EngineCalls(url) if rank == 0 else None
    bench = Bench(rank, size, model, url, calls, Path(folder), _shard_bytes(calls))
    judge = Judge(calls)
    turns = []
    try:
        for number in range(rounds):
            for method in methods(bench):
                if only and not any(part in method.name for part in only):
                    continue
                turns.append(_turn(method, bench, judge))
                if rank == 0:
                    print(f"round {number + 1}/{rounds}: {method.name}", file=sys.stderr)
    finally:
        if calls is not None:
            calls.close()
    dist.destroy_process_group()
    return turns


class Judge:
    """Compares the engine's checksums with those of an earlier refit to the same weights.

    The engine's first ones are of its own cold load. The other version's are the baseline's, which
    comes first.
    """

    def __init__(self, calls: EngineCalls | None) -> None:
        self._calls = calls
        self._version = 0
        self._known = {0: calls.checksums()} if calls is not None else {}

    def changed(self) -> None:
        """The trainer's weights are the other version now."""
        self._version = 1 - self._version

    def approves(self) -> bool:
        """Whether the engine has the trainer's version, and not the other."""
        if self._calls is None:
            return True
        found = self._calls.checksums()
        known = self._known.setdefault(self._version, found)
        other = self._known.get(1 - self._version)
        return found == known and found != other


def _turn(method: Method, bench: Bench, judge: Judge) -> Turn:
    before, engine_before = Memory.now(), _engine_memory(bench, reset=False)
    start = time.perf_counter()
    method.open()
    open_seconds = time.perf_counter() - start
    samples = []
    try:
        _refit(method, bench, judge)
        kept, engine_kept = Memory.now(), _engine_memory(bench, reset=True)
        reset_peak()
        samples = [_refit(method, bench, judge) for _ in range(REFITS)]
        peak, engine_peak = Memory.now(), _engine_memory(bench, reset=False)
        equal = judge.approves()
    finally:
        method.close()
    dist.barrier()
    return Turn(
        method=method.name,
        samples=tuple(samples),
        # What others share with an engine rank is theirs; what a trainer rank shares is its own.
        extra_bytes=max(0, kept.private + kept.shared - before.private - before.shared)
        + max(0, peak.peak - kept.resident),
        engine_extra_bytes=tuple(
            max(0, k.private - b.private) + max(0, p.peak - k.resident)
            for b, k, p in zip(engine_before, engine_kept, engine_peak, strict=True)
        ),
        equal=equal,
        open_seconds=open_seconds,
        shard_bytes=bench.shard_bytes,
    )


def _refit(method: Method, bench: Bench, judge: Judge) -> Sample:
    if method.name != "limit":
        negate(bench.model)
        judge.changed()
    dist.barrier()
    return method.run()


def _engine_memory(bench: Bench, *, reset: bool) -> list[Memory]:
    if bench.calls is None:
        return []
    answers = bench.calls.rpc("bench_memory", reset=reset)
    return [Memory(**cast(dict[str, int], answer)) for answer in answers]


def _shard_bytes(calls: EngineCalls | None) -> tuple[int, ...]:
    """What each engine rank needs, on every trainer rank."""
    told: list[object] = [None]
    if calls is not None:
        told = [[cast(int, each["nbytes"]) for each in calls.rpc("bench_prepare_limit")]]
        calls.rpc("bench_drop_limit")
    dist.broadcast_object_list(told)
    return tuple(cast(list[int], told[0]))
