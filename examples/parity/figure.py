"""The figure: rewards, staleness, idleness."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from examples.parity.experiment import Run

COLOURS = ("tab:gray", "tab:blue", "tab:green", "tab:orange")


def by_way(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """All seeds of each way, in the order in which the ways came."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.way, []).append(run)
    return found


def draw(runs: Sequence[Run], file: Path) -> None:
    """Draw it."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    (steps, wall), (ages, idle) = axes
    ways = by_way(runs)
    for colour, (way, same) in zip(COLOURS, ways.items(), strict=False):
        means = smooth(
            [statistics.mean(each) for each in zip(*(r.rewards for r in same), strict=True)]
        )
        low = smooth([min(each) for each in zip(*(r.rewards for r in same), strict=True)])
        high = smooth([max(each) for each in zip(*(r.rewards for r in same), strict=True)])
        seconds = [statistics.mean(each) for each in zip(*(r.seconds for r in same), strict=True)]
        numbers = range(1, len(means) + 1)
        steps.plot(numbers, means, color=colour, label=way)
        steps.fill_between(numbers, low, high, color=colour, alpha=0.15, linewidth=0)
        wall.plot(seconds, means, color=colour, label=way)
    steps.set(xlabel="step", ylabel="reward", title="mean of the seeds, band: least to greatest")
    wall.set(xlabel="seconds", ylabel="reward", title="the same against wall time")
    steps.legend(fontsize="small")

    most = max(age for run in runs for age in run.staleness)
    width = 0.8 / len(ways)
    for number, (colour, (way, same)) in enumerate(zip(COLOURS, ways.items(), strict=False)):
        total = sum(sum(run.staleness.values()) for run in same)
        shares = [sum(run.staleness[age] for run in same) / total for age in range(most + 1)]
        places = [age + (number - (len(ways) - 1) / 2) * width for age in range(most + 1)]
        ages.bar(places, shares, width, color=colour, label=way)
    ages.set(
        xlabel="staleness (versions)",
        ylabel="share of groups",
        title="staleness of what was trained",
    )
    ages.set_xticks(range(most + 1))

    engines = list(dict.fromkeys(name for run in runs for name in run.idle))
    sides = ["trainer", *(f"engine {number}" for number in range(len(engines)))]
    for number, (colour, (way, same)) in enumerate(zip(COLOURS, ways.items(), strict=False)):
        shares = [statistics.mean(run.trainer_idle for run in same)]
        shares += [statistics.mean(run.idle.get(name, 0.0) for run in same) for name in engines]
        places = [side + (number - (len(ways) - 1) / 2) * width for side in range(len(sides))]
        idle.bar(places, shares, width, color=colour, label=way)
    idle.set_xticks(range(len(sides)), sides)
    idle.set(ylabel="share of time", ylim=(0, 1), title="idle (co-located: generating)")
    for axis in (steps, wall, ages, idle):
        axis.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def smooth(values: Sequence[float], over: int = 5) -> list[float]:
    """The running mean of the last few values."""
    return [statistics.mean(values[max(0, at - over + 1) : at + 1]) for at in range(len(values))]
