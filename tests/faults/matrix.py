"""`make faults`: inject every fault of the matrix, judge, print and write what came of it."""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from tests.faults.bench import DEADLINE, Bench, Result
from tests.faults.cases import PHASES, VICTIMS, WAYS, Case, all_cases, selected, short


def run(
    cases: Sequence[Case],
    folder: Path,
    console: Console | None = None,
    *,
    deadline: float = DEADLINE,
) -> list[Result]:
    """Inject these faults, way by way, in as few processes as they leave alive."""
    results = []
    for transport, install in WAYS:
        mine = [case for case in cases if case.way == (transport, install)]
        if not mine:
            continue
        place = folder / f"{transport}-{install}"
        with Bench(transport, install, place, deadline=deadline) as bench:
            for case in mine:
                results.append(bench.run(case))
                if console is not None:
                    _tell(console, results[-1], len(results), len(cases))
    return results


def _tell(console: Console, result: Result, number: int, total: int) -> None:
    if result.good:
        console.print(f"{number}/{total} {result.case}: {result.outcome} {result.seconds:.1f} s")
        return
    console.print(f"[bold red]{number}/{total} {result.case}: {faults(result)}[/]")
    console.print(f"    {result.words}\n    {result.text!r}\n    {result.notes}", markup=False)


def faults(result: Result) -> str:
    """What is wrong with a result, in words."""
    words = []
    if result.outcome == "mixed":
        words.append("mixed")
    if result.hung:
        words.append("hung: " + ", ".join(result.hung))
    if not result.named:
        words.append("unnamed")
    if not result.recovered:
        words.append("not recovered")
    if not result.fired:
        words.append("not injected")
    return "; ".join(words)


def summary(results: Sequence[Result]) -> dict[str, int]:
    """The counts of `build/faults.json`."""
    outcomes = Counter(result.outcome for result in results)
    return {
        "cases": len(results),
        "old": outcomes["old"],
        "new": outcomes["new"],
        "fenced": outcomes["fenced"],
        "mixed": outcomes["mixed"],
        "hung": sum(bool(result.hung) for result in results),
        "unnamed": sum(not result.named for result in results),
        "not_recovered": sum(not result.recovered for result in results),
        "not_injected": sum(not result.fired for result in results),
    }


def as_json(results: Sequence[Result], seconds: float) -> dict[str, object]:
    """What is written to `build/faults.json`."""
    listed = [
        {
            "transport": result.case.transport,
            "install": result.case.install,
            "phase": result.case.phase,
            "victim": result.case.victim,
            "fault": result.case.kind,
            "part": result.case.part,
            "outcome": result.outcome,
            "engine": result.words,
            "hung": list(result.hung),
            "named": result.named,
            "recovered": result.recovered,
            "injected": result.fired,
            "seconds": round(result.seconds, 2),
            "error": result.text,
            "notes": result.notes,
        }
        for result in results
    ]
    return {**summary(results), "seconds": round(seconds, 1), "list": listed}


def show(results: Sequence[Result], console: Console) -> None:
    """The matrix: phase by victim; in each field the outcomes of its cases."""
    table = Table(title="faults: old / new / fenced / mixed, hung, unnamed")
    table.add_column("phase")
    for victim in VICTIMS:
        table.add_column(victim, justify="right")
    for phase in PHASES:
        row = [
            _field(r for r in results if (r.case.phase, r.case.victim) == (phase, victim))
            for victim in VICTIMS
        ]
        table.add_row(phase, *row)
    console.print(table)
    console.print("  ".join(f"{name} {count}" for name, count in summary(results).items()))


def _field(results: Iterable[Result]) -> str:
    results = list(results)
    if not results:
        return "-"
    counts = summary(results)
    text = f"{counts['old']}/{counts['new']}/{counts['fenced']}"
    bad = [f"{counts[n]} {n}" for n in ("mixed", "hung", "unnamed", "not_recovered") if counts[n]]
    return f"{text} [bold red]{', '.join(bad)}[/]" if bad else text


@click.command()
@click.option("--all", "everything", is_flag=True, help="every case of every way (about an hour)")
@click.option("--short", "few", is_flag=True, help="the dozen of the suite")
@click.option("--only", default="", help="cases whose description contains this")
@click.option("--way", default="", help="such as gloo-staged")
@click.option("--deadline", default=2 * DEADLINE, show_default=True, help="a phase, in seconds")
@click.option("--out", default="build/faults.json", type=click.Path(path_type=Path))
def main(everything: bool, few: bool, only: str, way: str, deadline: float, out: Path) -> None:
    """Inject the faults of the matrix into real processes; exit 1 if one ended badly."""
    cases = list(all_cases()) if everything else short() if few else selected()
    cases = [c for c in cases if only in str(c) and way in ("", f"{c.transport}-{c.install}")]
    console = Console()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reshard-faults-") as folder:
        results = run(cases, Path(folder), console, deadline=deadline)
    took = time.monotonic() - start
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(as_json(results, took), indent=1) + "\n")
    show(results, console)
    console.print(f"{len(results)} cases in {took:.0f} s; written to {out}")
    sys.exit(any(not result.good for result in results))


if __name__ == "__main__":
    main()
