"""What `reshard size` foretells from one way's figures, beside what the others took.

Sizing takes trainer and engines to have a machine each. Where they share cores, steps in which both
work at once take longer than it says.
"""

import statistics
from collections.abc import Sequence

from examples.parity.experiment import Experiment, Run

from reshard_trainer.sizing import EngineSpeed, Workload, simulate

_LEAST_SECONDS = 1e-6


def workload(sequential: Sequence[Run], experiment: Experiment) -> Workload:
    """What a step costs, read off the sequential runs: there each part runs alone."""
    steps = [len(run.seconds) for run in sequential]
    waited = statistics.mean(
        run.waited_seconds / n for run, n in zip(sequential, steps, strict=True)
    )
    generation = max(_LEAST_SECONDS, waited)
    transfer = statistics.mean(
        run.publish_seconds / n for run, n in zip(sequential, steps, strict=True)
    )
    whole = statistics.mean(run.wall_seconds / n for run, n in zip(sequential, steps, strict=True))
    requests = sum(engine.slots for engine in experiment.engines)
    engines = []
    for engine in experiment.engines:
        slots = max(1, engine.slots // experiment.samples)
        per_second = experiment.batch / generation * engine.slots / requests
        engines.append(EngineSpeed(slots, slots / per_second, transfer))
    step = max(_LEAST_SECONDS, whole - generation - transfer)
    return Workload(step, experiment.batch, tuple(engines))


def sized(ways: dict[str, list[Run]], experiment: Experiment) -> str:
    """A table: seconds of a step and the trainer's busy share, foretold and measured."""
    if "sequential" not in ways:
        return ""
    asked = workload(ways["sequential"], experiment)
    heads = ["way", "step, foretold", "step, measured", "trainer busy, foretold", "measured"]
    rows = [heads, ["---"] * len(heads)]
    for way, runs in ways.items():
        if way == "co-located":
            continue
        bound = 0 if way == "sequential" else int(way.rpartition(" ")[2])
        usage = simulate(asked, bound)
        step = statistics.mean(run.wall_seconds / len(run.seconds) for run in runs)
        busy = statistics.mean(
            1 - run.trainer_idle - run.publish_seconds / run.wall_seconds for run in runs
        )
        rows.append(
            [
                way,
                f"{usage.step_seconds:.2f} s",
                f"{step:.2f} s",
                f"{usage.trainer_busy:.0%}",
                f"{busy:.0%}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
