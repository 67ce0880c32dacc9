"""The page that says what came out: written by each run, never by hand."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from examples.parity.experiment import Experiment, Run
from examples.parity.figure import by_way
from examples.parity.sized import sized

PAGE = """\
# Four ways to train, measured

Written by `make parity`, {date}, on {machine}. Seeds: {seeds}; {steps} steps of {batch} prompts x
{samples} samples a run; the task is to "{task}" (`examples/parity/task.py`). Two vLLM servers, of
{slots} requests at once; trainer and engines share the machine's cores. A load (mean of the last 15
minutes) much above the number of cores says that others used them too: then rewards and staleness
count, seconds do not.

![Reward against steps and wall time, staleness, idle time](pictures/parity.png)

{table}

- Final reward: mean of the last tenth of the steps; mean over the seeds, least to greatest.
- Idle, of the trainer: it had no batch (co-located: it generated). Publishing: it held up the
  trainer; the asynchronous ways publish beside the training and skip engines that still take an
  earlier version (`overlap=True, busy_engines="skip"`). Idle, of an engine: it had no request.
- Staleness: of trained groups, in versions.

{verdict}

## What sizing foretells
`reshard size`, given what a step, a batch and a refit took in the sequential runs. It takes trainer
and engines to have a machine each: where they share cores, a step of an asynchronous way takes
longer than foretold, and the trainer is busy for longer because its own work is slower.

{sized}
"""


def write_document(runs: Sequence[Run], experiment: Experiment, file: Path) -> None:
    """Write it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        PAGE.format(
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            machine=f"{os.cpu_count()} cores ({platform.machine()}; load {os.getloadavg()[2]:.1f})",
            seeds=len({run.seed for run in runs}),
            steps=experiment.steps,
            batch=experiment.batch,
            samples=experiment.samples,
            task=experiment.task.name,
            slots=" and ".join(str(engine.slots) for engine in experiment.engines),
            table=table(runs),
            verdict=verdict(runs),
            sized=sized(by_way(runs), experiment),
        )
    )


def table(runs: Sequence[Run]) -> str:
    """One row a way."""
    engines = list(dict.fromkeys(name for run in runs for name in run.idle))
    heads = ["way", "final reward", "seconds", "trainer idle", "publishing"]
    heads += [f"engine {number} idle" for number in range(len(engines))]
    heads += ["staleness mean", "most", "evicted"]
    rows = [heads, ["---"] * len(heads)]
    for way, same in by_way(runs).items():
        ages = [age for run in same for age in run.staleness.elements()]
        rows.append(
            [
                way,
                spread(same, lambda run: run.final_reward),
                f"{mean(same, lambda run: run.wall_seconds):.1f}",
                f"{mean(same, lambda run: run.trainer_idle):.0%}",
                f"{mean(same, lambda run: run.publish_seconds / run.wall_seconds):.0%}",
                *(idle(same, name) for name in engines),
                f"{statistics.mean(ages):.2f}",
                str(max(ages)),
                str(sum(run.evicted for run in same)),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def verdict(runs: Sequence[Run]) -> str:
    """How the ways compare, in the words that the figures allow."""
    ways = by_way(runs)
    first, *others = ways.values()
    lines = []
    for same in others:
        low, high = extremes(same)
        own_low, own_high = extremes(first)
        overlap = low <= own_high and own_low <= high
        compared = "overlaps with" if overlap else ("is above" if low > own_high else "is below")
        lines.append(
            f"- {same[0].way}: the spread of its final rewards {compared} that of {first[0].way}"
        )
        if same is not others[0]:
            faster = mean(others[0], seconds) / mean(same, seconds)
            lines[-1] += f"; {faster:.2f} times as fast as {others[0][0].way}"
        lines[-1] += "."
    return "\n".join(lines)


def seconds(run: Run) -> float:
    """Of the whole run."""
    return run.wall_seconds


def extremes(runs: Sequence[Run]) -> tuple[float, float]:
    """Least and greatest final reward."""
    finals = [run.final_reward for run in runs]
    return min(finals), max(finals)


def mean(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    """Of one figure, over the seeds."""
    return statistics.mean(map(figure, runs))


def spread(runs: Sequence[Run], figure: Callable[[Run], float]) -> str:
    """Mean, least and greatest."""
    values = list(map(figure, runs))
    return f"{statistics.mean(values):.2f} ({min(values):.2f} - {max(values):.2f})"


def idle(runs: Sequence[Run], engine: str) -> str:
    """Of one engine; a dash where it has no part."""
    shares = [run.idle[engine] for run in runs if engine in run.idle]
    return f"{statistics.mean(shares):.0%}" if shares else "-"
