"""The planning benchmark measures what ranks really do."""

from pathlib import Path

from benchmarks.planning import Case, _report, measure
from benchmarks.planning_report import as_figure, as_tables
from rich.console import Console
from tests.unit.simulation.test_methods import TINY

from reshard.ids import GroupRank
from reshard.layout.compact import CompactSide, expand
from reshard.simulation.parallelism import parse_parallelism, spread

CASE = Case("tiny", TINY, parse_parallelism("fsdp=4,ep=2"), parse_parallelism("tp=2,dp=2"), 1.0)


def test_its_reports_are_those_of_ranks() -> None:
    side = spread(TINY, CASE.trainer, 0, "float32")
    for rank in range(4):
        own = CompactSide.of_rank(side.for_rank(GroupRank(rank)))
        assert expand([_report(CompactSide.of_side(side), rank)]).side == expand([own]).side


def test_it_measures_prints_and_draws(tmp_path: Path) -> None:
    cost = measure(CASE)
    assert (cost.ranks, cost.tensors) == (8, TINY.tensors)
    assert cost.report_bytes < cost.received_bytes
    assert 0 < cost.kept_mib < cost.plan_mib
    console = Console(width=170, record=True, file=(tmp_path / "out").open("w"))
    for table in as_tables({"cases": [cost], "by_ranks": [cost]}):
        console.print(table)
    console.file.close()
    assert "256 trainer ranks to 128 engine ranks" in console.export_text()
    as_figure([cost], [cost], tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text()
