"""`make soak`: hundreds of refits, one in ten struck, and nothing grows.

Counted in every process that lives through all of it: resident memory, descriptors, sockets,
threads, and mappings of shared memory.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from tests.faults.bench import Bench, Result
from tests.faults.cases import WAYS, Case, all_cases

SEED = 20261201
STRUCK = 10
"""One refit in so many is struck, on average."""

GROWTH: Mapping[str, float] = {
    "rss_kib": 8 * 1024.0,
    "descriptors": 2.0,
    "sockets": 2.0,
    "threads": 1.0,
    "shared_mappings": 1.0,
}
"""How much more the last fifth of the samples may have than the second, by measure."""


@dataclass(frozen=True, slots=True)
class Trend:
    """One measure of one process over a soak.

    Attributes:
        process: which.
        measure: of `GROWTH`.
        before: median of the second fifth of the samples; the first is warming up.
        after: median of the last fifth.
        slope: of the fitted line over all but the first fifth, per refit.
    """

    process: str
    measure: str
    before: float
    after: float
    slope: float

    @property
    def grows(self) -> bool:
        """Whether it ends higher than it may."""
        return self.after - self.before > GROWTH[self.measure]


def measured(pid: int) -> dict[str, float]:
    """What a process holds now."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    held = [_target(entry) for entry in (folder / "fd").iterdir()]
    maps = (folder / "maps").read_text().splitlines()
    return {
        "rss_kib": float(status["VmRSS"].split()[0]),
        "threads": float(status["Threads"]),
        "descriptors": float(len(held)),
        "sockets": float(sum(place.startswith("socket:") for place in held)),
        "shared_mappings": float(sum("/memfd:" in line or "/dev/shm/" in line for line in maps)),
    }


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:
        return ""


def trends(samples: Mapping[str, Sequence[tuple[int, Mapping[str, float]]]]) -> list[Trend]:
    """The trends of all processes: samples are (refits done, what was measured)."""
    found = []
    for process, taken in samples.items():
        fifth = max(1, len(taken) // 5)
        for measure in GROWTH:
            values = [each[measure] for _, each in taken]
            refits = [number for number, _ in taken]
            slope = float(np.polyfit(refits[fifth:], values[fifth:], 1)[0])
            before, after = median(values[fifth : 2 * fifth]), median(values[-fifth:])
            found.append(Trend(process, measure, before, after, slope))
    return found


class Soak:
    """Refits over and over, one way of moving and installing.

    Attributes:
        refits: how many were made, failed ones included.
        struck: the cases that were injected.
    """

    def __init__(self, bench: Bench, seed: int) -> None:
        self.refits = 0
        self.struck: list[Result] = []
        self._bench = bench
        self._random = random.Random(seed)
        self._next_strike = self._random.randrange(STRUCK)
        self._cases = [
            case
            for case in all_cases()
            if case.way == bench.way and case.kind in ("exception", "cut", "wrong")
        ]

    def run(self, refits: int, every: int) -> dict[str, list[tuple[int, dict[str, float]]]]:
        """Make so many refits; samples by process, one each `every` refits."""
        pids = self._bench.pids()
        samples: dict[str, list[tuple[int, dict[str, float]]]] = {name: [] for name in pids}
        next_sample = 0
        while self.refits < refits:
            if self.refits >= next_sample:
                next_sample += every
                for name, pid in pids.items():
                    samples[name].append((self.refits, measured(pid)))
            if self.refits >= self._next_strike:
                self._next_strike += self._random.randint(STRUCK // 2, STRUCK + STRUCK // 2)
                # The failed one and the one that follows.
                self.struck.append(self._bench.run(self._pick()))
                self.refits += 2
            else:
                self._bench.refit()
                self.refits += 1
        assert self._bench.pids() == pids, "a process was replaced"
        return samples

    def _pick(self) -> Case:
        return self._random.choice(self._cases)


def soak(refits: int, every: int, folder: Path) -> tuple[list[Trend], list[Result], int]:
    """Half of the refits over gloo into shadows, half over shared memory in place."""
    found: list[Trend] = []
    struck: list[Result] = []
    made = 0
    for transport, install in (WAYS[0], WAYS[3]):
        with Bench(transport, install, folder / transport) as bench:
            runs = Soak(bench, SEED)
            samples = runs.run(refits // 2, every)
            made += runs.refits
            struck += runs.struck
        found += trends({f"{transport} {name}": taken for name, taken in samples.items()})
    return found, struck, made


@click.command()
@click.option("--refits", default=500, show_default=True)
@click.option("--every", default=5, show_default=True, help="refits between two samples")
@click.option("--out", default="build/soak.json", type=click.Path(path_type=Path))
def main(refits: int, every: int, out: Path) -> None:
    """Refit many times with failures between; exit 1 if anything grows or a refit ends badly."""
    console = Console()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reshard-soak-") as folder:
        found, struck, made = soak(refits, every, Path(folder))
    took = time.monotonic() - start
    table = Table("process", "measure", "before", "after", "per refit", title="soak")
    for trend in found:
        style = "bold red" if trend.grows else ""
        words = (f"{trend.before:g}", f"{trend.after:g}", f"{trend.slope:+.3f}")
        table.add_row(trend.process, trend.measure, *words, style=style)
    console.print(table)
    bad = [result for result in struck if not result.good]
    growing = [trend for trend in found if trend.grows]
    for result in bad:
        console.print(f"{result.case}: {result.outcome}, {result.text!r} {result.notes}")
    console.print(
        f"{made} refits in {took:.0f} s, {len(struck)} of them struck; {len(bad)} ended badly, "
        f"{len(growing)} of {len(found)} measures grow"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "refits": made,
        "struck": len(struck),
        "bad": len(bad),
        "growing": len(growing),
        "seconds": round(took, 1),
        "trends": [
            {
                "process": t.process,
                "measure": t.measure,
                "before": t.before,
                "after": t.after,
                "slope": t.slope,
            }
            for t in found
        ],
    }
    out.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(bool(bad or growing))


if __name__ == "__main__":
    main()
