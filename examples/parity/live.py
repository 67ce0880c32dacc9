"""A terminal view of the run that is on: counters as they change; a line for each that ended."""

from types import TracebackType
from typing import Self

from examples.parity.experiment import Experiment, Run
from rich import live as rich_live
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


class Live:
    """A context manager; without a terminal it prints one line a run."""

    def __init__(self, console: Console, experiment: Experiment) -> None:
        self._console = console
        self._steps = experiment.steps
        self._view = rich_live.Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._view.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._view.stop()

    def begin(self, way: str, seed: int) -> None:
        """A run starts."""
        self._view.update(Text(f"{way}, seed {seed}: connecting"))

    def notice(self, run: Run) -> None:
        """A run made a step."""
        table = Table.grid(padding=(0, 2))
        for name, value in counters(run).items():
            table.add_row(name, value)
        bar = ProgressBar(total=self._steps, completed=len(run.rewards), width=40)
        self._view.update(Group(Text(f"{run.way}, seed {run.seed}"), bar, table))

    def end(self, run: Run) -> None:
        """A run ended."""
        line = ", ".join(f"{name} {value}" for name, value in counters(run).items() if value)
        self._console.print(f"{run.way}, seed {run.seed}: {line}", highlight=False)


def counters(run: Run) -> dict[str, str]:
    """What a run is at, in words."""
    groups = sum(run.staleness.values())
    age = sum(age * count for age, count in run.staleness.items()) / groups
    engines = [f"{name} {share:.0%}" for name, share in run.idle.items()]
    return {
        "step": f"{len(run.rewards)} in {run.wall_seconds:.1f} s",
        "reward": f"{run.rewards[-1]:.2f}",
        "staleness": f"mean {age:.2f}, most {max(run.staleness)}, evicted {run.evicted}",
        "idle": ", ".join([f"trainer {run.trainer_idle:.0%}", *engines]),
        "publishing": f"{run.publish_seconds / run.wall_seconds:.0%}",
        "now": run.state,
    }
