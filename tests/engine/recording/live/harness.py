"""`make live`: every live case; results go to `build/live.json` and into `docs/live.md`."""

import argparse
import json
import os
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tests.engine.recording.live.cases import LIVE, LiveCase
from tests.engine.recording.live.hosts import Hosts, Outcome

_ROOT: Final = Path(__file__).parents[4]
_FOLDER: Final = _ROOT / "build" / "live"
_RESULTS: Final = _ROOT / "build" / "live.json"
_TABLE: Final = _ROOT / "docs" / "live.md"

_HEAD: Final = """# Live engines

Written by `make live` from a run; do not edit.

Each row is a tiny random model of one configuration of [architectures.md](architectures.md). A
vLLM engine starts on checkpoint A, is refitted to B (staged), and back to A (in place). After each
step it is asked for the log-probabilities of three prompts, 16 greedy tokens each, and vLLM's
checksums of all parameters; all must be those of an engine that vLLM alone started on the same
checkpoint. "A to B" is the largest difference of a log-probability between these two: what there
was to see.
"""


def main() -> int:
    """Run the cases that are named, or all; merge into the results; write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _FOLDER.mkdir(parents=True)
    results: dict[str, Any] = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    hosts = Hosts(_FOLDER)
    try:
        for case in LIVE:
            if names and case.name not in names:
                continue
            began = time.monotonic()
            try:
                outcome = hosts.run(case)
            except AssertionError as error:
                outcome = Outcome((str(error),), 0.0, 0.0, ())
                hosts.close()
                hosts = Hosts(_FOLDER)
            seconds = time.monotonic() - began
            results[case.name] = {**asdict(outcome), "seconds": seconds, "day": _today()}
            _RESULTS.write_text(json.dumps(results, indent=1))
            print(case.name, outcome.faults or "identical", f"{seconds:.0f} s", flush=True)
    finally:
        hosts.close()
    _TABLE.write_text(as_markdown(results))
    return int(any(results[c.name]["faults"] for c in LIVE if c.name in results))


def as_markdown(results: dict[str, Any]) -> str:
    """The table of the cases that have a result."""
    run = [case for case in LIVE if case.name in results]
    equal = sum(not results[case.name]["faults"] for case in run)
    days = sorted({results[case.name]["day"] for case in run})
    return "\n".join(
        [
            _HEAD,
            f"**{equal} of {len(run)} engines were bit for bit cold ones, each time.** "
            f"Run on {' and '.join(days)}, {_machine()}.\n",
            "| what | configuration | ranks | result | largest difference | A to B | direct "
            "| repacked | computed | redundancy |",
            "|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
            *(_row(case, results[case.name]) for case in run),
            "",
            "Expert parallel engines are not among them: vLLM's CPU kernel of experts ends in a "
            "segmentation\nfault there, with or without a refit. Their layouts are compared "
            "without an engine (architectures.md, EP 2).\n",
        ]
    )


def _row(case: LiveCase, result: dict[str, Any]) -> str:
    reports: Sequence[dict[str, Any]] = result["reports"]
    first = reports[0] if reports else {}
    total = sum(first.get(kind, 0) for kind in ("direct", "repacked", "computed")) or 1
    cells = [
        case.shows,
        case.name,
        str(case.tensor_parallel),
        "; ".join(result["faults"]) or "=",
        f"{result['largest']:g}",
        f"{result['moved']:.2f}",
        *(f"{100 * first.get(k, 0) / total:.1f} %" for k in ("direct", "repacked", "computed")),
        f"{max((r['redundancy'] for r in reports), default=0):.3f}",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _machine() -> str:
    return f"{os.cpu_count()} cores ({platform.machine()}), vLLM's CPU build"


if __name__ == "__main__":
    raise SystemExit(main())
