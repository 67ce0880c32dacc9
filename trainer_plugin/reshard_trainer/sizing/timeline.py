"""A run in fast motion: who works when, under the admission gate. Deterministic.

The same rules as the desk's (`reshard_trainer.rollouts`), reduced to counts and times. Group times
differ by a fixed low-discrepancy sequence, so that engines do not march in step.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from reshard_trainer.sizing.workload import EngineSpeed, Workload

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Usage:
    """A run's steady state.

    Attributes:
        step_seconds: from one optimizer step to the next.
        trainer_busy: share of time in which the trainer makes steps.
        engines_busy: share of the engines' slot time in which they generate what is trained.
    """

    step_seconds: float
    trainer_busy: float
    engines_busy: float


@dataclass(slots=True)
class _Engine:
    """Attributes: see `EngineSpeed`; `lag` is all time that it stood still so far."""

    speed: EngineSpeed
    version: int = 0
    running: int = 0
    lag: float = 0.0
    paused_until: float = 0.0
    receives: bool = False


@dataclass(slots=True)
class _Run:
    workload: Workload
    max_staleness: int
    engines: list[_Engine]
    times: Iterator[float]
    events: list[tuple[float, int, str, tuple[float, ...]]] = field(default_factory=list)
    now: float = 0.0
    number: int = 0
    accepted: int = 0
    waiting: list[int] = field(default_factory=list)
    """Versions of buffered groups, a heap."""
    next_step: int = 0
    published: int = 0
    training: bool = False
    work_seconds: float = 0.0

    def plan(self, at: float, what: str, *details: float) -> None:
        self.number += 1
        heapq.heappush(self.events, (at, self.number, what, details))

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self.engines)


def simulate(workload: Workload, max_staleness: int, *, steps: int = 80) -> Usage:
    """The steady state of asynchronous mode; with `max_staleness` 0, that of sequential mode.

    Args:
        workload: what things cost.
        max_staleness: the gate's bound, at least `publish_every - 1`.
        steps: optimizer steps to look at; the first quarter does not count.
    """
    run = _Run(
        workload,
        max_staleness,
        [_Engine(speed) for speed in workload.engines],
        _spread_out(workload.spread),
    )
    warm = steps // 4
    start, start_work = 0.0, 0.0
    _fill(run)
    while run.next_step < steps:
        before = run.next_step
        run.now = run.events[0][0]
        # What happens at one time happens before anybody acts on a part of it.
        while run.events and run.events[0][0] <= run.now:
            _, _, what, details = heapq.heappop(run.events)
            _happen(run, what, details)
        _fill(run)
        if before < warm <= run.next_step:
            start, start_work = run.now, run.work_seconds
    span = run.now - start
    slots = sum(speed.slots for speed in workload.engines)
    made = run.next_step - warm
    return Usage(
        step_seconds=span / made,
        trainer_busy=min(1.0, made * workload.step_seconds / span),
        engines_busy=min(1.0, (run.work_seconds - start_work) / (span * slots)),
    )


def _spread_out(spread: float) -> Iterator[float]:
    """Factors around 1, evenly spread."""
    place = 0.5
    while True:
        yield 1 + spread * (2 * place - 1)
        place = (place + _GOLDEN) % 1


def _happen(run: _Run, what: str, details: tuple[float, ...]) -> None:
    match what:
        case "finished":
            _finish_group(run, *details)
        case "trained":
            _finish_step(run)
        case "received":
            _install(run, run.engines[int(details[0])], int(details[0]), int(details[1]))
        case "resumed":
            _receive(run, int(details[0]))
    _train(run)


def _finish_group(
    run: _Run, number: float, local_end: float, version: float, seconds: float
) -> None:
    engine = run.engines[int(number)]
    end = local_end + engine.lag
    if end > run.now + 1e-9:
        # The engine stood still meanwhile.
        run.plan(end, "finished", number, local_end, version, seconds)
        return
    engine.running -= 1
    if run.next_step - version <= run.max_staleness:
        run.accepted += 1
        run.work_seconds += seconds
        heapq.heappush(run.waiting, int(version))


def _train(run: _Run) -> None:
    while run.waiting and run.next_step - run.waiting[0] > run.max_staleness:
        heapq.heappop(run.waiting)
        run.accepted -= 1
    if run.training or len(run.waiting) < run.workload.batch:
        return
    for _ in range(run.workload.batch):
        heapq.heappop(run.waiting)
    run.training = True
    run.plan(run.now + run.workload.step_seconds, "trained")


def _finish_step(run: _Run) -> None:
    run.training = False
    run.next_step += 1
    if run.next_step % run.workload.publish_every == 0:
        run.published = run.next_step
        for number in range(len(run.engines)):
            _receive(run, number)


def _receive(run: _Run, number: int) -> None:
    """Start to receive the newest version, unless one is under way."""
    engine = run.engines[number]
    if engine.receives or engine.version >= run.published:
        return
    engine.receives = True
    run.plan(run.now + engine.speed.transfer_seconds, "received", number, run.published)


def _install(run: _Run, engine: _Engine, number: int, version: int) -> None:
    pause = engine.speed.pause_seconds
    engine.version = version
    engine.receives = False
    engine.lag += pause
    engine.paused_until = run.now + pause
    run.plan(engine.paused_until, "resumed", number)


def _fill(run: _Run) -> None:
    """Start groups wherever the gate admits them, on the emptiest engine first."""
    while True:
        able = [
            (engine.running / engine.speed.slots, number)
            for number, engine in enumerate(run.engines)
            if engine.running < engine.speed.slots
            and run.now >= engine.paused_until
            and run.accepted + run.running
            < (run.max_staleness + engine.version + 1) * run.workload.batch
        ]
        if not able:
            return
        _, number = min(able)
        engine = run.engines[number]
        seconds = engine.speed.group_seconds * next(run.times)
        engine.running += 1
        local_end = run.now - engine.lag + seconds
        run.plan(local_end + engine.lag, "finished", number, local_end, engine.version, seconds)
