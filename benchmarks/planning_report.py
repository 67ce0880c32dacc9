"""The planning benchmark's figures, as tables and as a picture."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table


@dataclass(frozen=True)
class Cost:
    """What a case cost.

    Planning is one thread of pure Python, so seconds of the processor are what a rank with a core
    of its own waits; other programs on the machine lengthen wall time alone.

    Attributes:
        name, trainer, engine: of the case.
        ranks: of both sides.
        tensors: canonical ones.
        operations: of the plan.
        describe_seconds: a rank's own layout (given as groups) as a report, the slower side.
        merge_seconds: trainer rank 0 alone: all reports into the world's layouts.
        plan_seconds: from the received layouts to the plan and its digest.
        part_seconds: a rank's own part and its ordered messages, the slower side.
        wall_seconds: of describing, plan and part, by the clock.
        again_seconds: the plan for the same layouts once more, from the cache.
        report_bytes: what a rank sends, the larger side.
        received_bytes: layouts that a rank receives.
        plan_mib: most memory in use while planning, layouts included.
        kept_mib: memory of the finished plan.
        part_mib: most memory in use for a rank's part and its messages.
        target_seconds: see `Case`.
    """

    name: str
    trainer: str
    engine: str
    ranks: int
    tensors: int
    operations: int
    describe_seconds: float
    merge_seconds: float
    plan_seconds: float
    part_seconds: float
    wall_seconds: float
    again_seconds: float
    report_bytes: int
    received_bytes: int
    plan_mib: float
    kept_mib: float
    part_mib: float
    target_seconds: float

    @property
    def rank_seconds(self) -> float:
        """All that a rank does."""
        return self.describe_seconds + self.plan_seconds + self.part_seconds


TITLES = {
    "cases": "256 trainer ranks to 128 engine ranks",
    "by_ranks": "DeepSeek-V3 on more ranks",
    "by_tensors": "256 to 128 ranks, more tensors",
}


def as_tables(costs: Mapping[str, Sequence[Cost]]) -> Iterator[Table]:
    """One table for each group of cases."""
    for name, some in costs.items():
        table = Table(title=TITLES[name], title_justify="left")
        table.add_column("")
        for heading in (
            "tensors", "ops", "rank\ns", "goal\ns", "wall\ns", "its\nlayout", "plan\ns", "part\ns",
            "again\nus", "merge\ns", "sent\nkB", "got\nkB", "peak\nMiB", "plan\nMiB", "part\nMiB",
        ):  # fmt: skip
            table.add_column(heading, justify="right", no_wrap=True)
        for cost in some:
            table.add_row(*_row(cost))
        yield table


def _row(cost: Cost) -> Iterator[str]:
    yield cost.name
    yield f"{cost.tensors:,}"
    yield f"{cost.operations:,}"
    yield f"{cost.rank_seconds:.2f}"
    yield f"{cost.target_seconds:g}" if cost.target_seconds else ""
    yield f"{cost.wall_seconds:.2f}"
    yield f"{cost.describe_seconds:.2f}"
    yield f"{cost.plan_seconds:.2f}"
    yield f"{cost.part_seconds:.2f}"
    yield f"{cost.again_seconds * 1e6:.0f}"
    yield f"{cost.merge_seconds:.2f}"
    yield f"{cost.report_bytes / 1e3:.1f}"
    yield f"{cost.received_bytes / 1e3:.0f}"
    yield f"{cost.plan_mib:.0f}"
    yield f"{cost.kept_mib:.0f}"
    yield f"{cost.part_mib:.0f}"


def as_figure(by_ranks: Sequence[Cost], by_tensors: Sequence[Cost], path: Path) -> None:
    """Seconds and memory of a rank over the number of ranks and of tensors."""
    # Drawn without a display; imported here, since only a figure needs it.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, some, x, label in (
        (axes[0], by_ranks, [cost.ranks for cost in by_ranks], "ranks of both sides"),
        (axes[1], by_tensors, [cost.tensors for cost in by_tensors], "tensors, on 256 + 128 ranks"),
    ):
        for name, values in (
            ("a rank, all of it", [cost.rank_seconds for cost in some]),
            ("of it: the plan", [cost.plan_seconds for cost in some]),
            ("rank 0 besides: merge", [cost.merge_seconds for cost in some]),
        ):
            axis.plot(x, values, marker="o", label=name)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.set_xticks(x, [f"{value:,}" for value in x])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_title("DeepSeek-V3: 45,395 tensors", fontsize="medium")
    axes[1].set_title("DeepSeek-V3 with other numbers of experts", fontsize="medium")
    axes[0].set_ylabel("seconds")
    axes[0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
