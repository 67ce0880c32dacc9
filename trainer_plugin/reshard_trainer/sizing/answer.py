"""What to choose for a workload, and what to expect of it.

    P = max(step, generation + pause)      the least time a step can take, both sides always busy

`generation` is the time in which all engines at full load make a batch. In sequential mode a step
takes `transfer + pause + generation + step`, one after the other, and longer where a batch does not
fill the slots evenly. How much staleness the pipeline needs to reach P follows from how much is in
flight: about `(step + transfer + longest group) / P + publish_every - 1`; the exact least value is
found by `timeline.simulate`.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from reshard_trainer.sizing.timeline import Usage, simulate
from reshard_trainer.sizing.workload import Workload

Mode = Literal["sequential", "asynchronous"]

WORTHWHILE: Final = 1.1
"""Asynchronous mode is advised from this speed-up on: below it, staleness buys little."""

TOLERANCE: Final = 0.02
"""Who idles for less than this share of the time counts as busy."""

_MOST_STALENESS: Final = 256


@dataclass(frozen=True, slots=True)
class Sizing:
    """The answer.

    Attributes:
        mode: which to choose.
        max_staleness: the least at which asynchronous mode loses nothing to the gate.
        engines_wanted: number of engines (like the first) with which the trainer never waits in
            asynchronous mode; None: no number is enough, because engines stand still for longer
            than a step takes.
        bottleneck: the side that is always busy in asynchronous mode.
        sequential: what to expect of sequential mode.
        asynchronous: what to expect of asynchronous mode at `max_staleness`.
    """

    mode: Mode
    max_staleness: int
    engines_wanted: int | None
    bottleneck: Literal["trainer", "engines"]
    sequential: Usage
    asynchronous: Usage

    @property
    def speed_up(self) -> float:
        """Of asynchronous over sequential mode."""
        return self.sequential.step_seconds / self.asynchronous.step_seconds


def size(
    workload: Workload, *, worthwhile: float = WORTHWHILE, tolerance: float = TOLERANCE
) -> Sizing:
    """What to choose for a workload.

    Args:
        workload: what things cost.
        worthwhile: least speed-up for which asynchronous mode is advised.
        tolerance: share of idle time that counts as none.
    """
    sequential = simulate(replace(workload, publish_every=1), 0)
    least = max(workload.step_seconds, workload.generation_seconds + workload.pause_seconds)
    staleness, asynchronous = _least_staleness(workload, tolerance)
    speed_up = sequential.step_seconds / asynchronous.step_seconds
    return Sizing(
        mode="asynchronous" if speed_up >= worthwhile else "sequential",
        max_staleness=staleness,
        engines_wanted=_engines_wanted(workload),
        bottleneck="trainer" if least <= workload.step_seconds else "engines",
        sequential=sequential,
        asynchronous=asynchronous,
    )


def _least_staleness(workload: Workload, tolerance: float) -> tuple[int, Usage]:
    """The least bound at which a step takes no longer than with a very large one."""
    best = simulate(workload, _MOST_STALENESS)
    low, high = workload.publish_every - 1, _MOST_STALENESS
    usage = best
    while low < high:
        middle = (low + high) // 2
        tried = simulate(workload, middle)
        if tried.step_seconds <= best.step_seconds * (1 + tolerance):
            high, usage = middle, tried
        else:
            low = middle + 1
    return high, usage


def _engines_wanted(workload: Workload) -> int | None:
    first = workload.engines[0]
    left = workload.step_seconds - first.pause_seconds / workload.publish_every
    if left <= 0:
        return None
    return math.ceil(workload.batch / (first.groups_per_second * left))
