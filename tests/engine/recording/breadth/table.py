"""The table of architectures, written from the results of a run."""

import re
from collections.abc import Sequence

from tests.engine.recording.breadth.results import Outcome, Result

_HEAD = """# Architectures

Written by `make breadth` from a run; do not edit.

Each row is a tiny random model of one configuration, its checkpoint filled with index codes. It is
recorded, proven, refitted with other codes and taken back, in both install modes; "=" means: every
parameter, buffer, derived tensor and packed layer on every rank has, after each of these refits,
the bytes that vLLM's own `load_weights` and post-load steps give. Shares are of the bytes
that a rank receives at tensor parallel 1, on the CPU that made this table: on another machine other
layers are packed. TP, EP and PP: tensor, expert and pipeline parallel, with their number of ranks.
"""


def as_markdown(results: Sequence[Result]) -> str:
    """Totals, the table of what is covered, and what is not, with its reason."""
    covered = [result for result in results if _covered(result)]
    rest = [result for result in results if not _covered(result)]
    classes = {result.vllm_class for result in covered}
    layouts = {
        layout: sum(
            layout in r.outcomes and r.outcomes[layout].state == "identical" for r in covered
        )
        for layout in ("tp1", "tp2", "ep2", "pp2")
    }
    said = ", ".join(f"{n} at {layout.upper()}" for layout, n in layouts.items())
    lines = [
        _HEAD,
        f"**{len(covered)} configurations over {len(classes)} vLLM classes are covered** "
        f"(bit-identical: {said}).\n",
        "| configuration | vLLM class | kind | direct | repacked | computed "
        "| computed by the loader | TP 1 | TP 2 | EP 2 | PP 2 |",
        "|---|---|---|---:|---:|---:|---|---|---|---|---|",
        *(_row(result) for result in covered),
    ]
    if rest:
        lines += [
            "\n## Not covered\n",
            "| configuration | vLLM class | layout | state | reason |",
            "|---|---|---|---|---|",
            *(line for result in rest for line in _reasons(result)),
        ]
    partly = [line for result in covered for line in _reasons(result)]
    if partly:
        lines += [
            "\n## Layouts of covered configurations that are not\n",
            "| configuration | vLLM class | layout | state | reason |",
            "|---|---|---|---|---|",
            *partly,
        ]
    return "\n".join(lines) + "\n"


def _covered(result: Result) -> bool:
    """Identical at tensor parallel 1, and nowhere different."""
    states = {layout: outcome.state for layout, outcome in result.outcomes.items()}
    return states.get("tp1") == "identical" and "different" not in states.values()


def _row(result: Result) -> str:
    first = result.outcomes["tp1"]
    total = sum(first.bytes.values()) or 1
    shares = [
        f"{100 * first.bytes.get(kind, 0) / total:.1f} %"
        for kind in ("direct", "repacked", "computed")
    ]
    names = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in first.computed})
    marks = [_mark(result.outcomes.get(layout)) for layout in ("tp1", "tp2", "ep2", "pp2")]
    computed = ", ".join(f"`{name}`" for name in names)
    cells = (result.name, result.vllm_class, result.kind, *shares, computed, *marks)
    return "| " + " | ".join(cells) + " |"


def _mark(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    return "=" if outcome.state == "identical" else outcome.state


def _reasons(result: Result) -> list[str]:
    return [
        f"| {result.name} | {result.vllm_class} | {layout.upper()} | {outcome.state} "
        f"| {_one_line(outcome.reason)} |"
        for layout, outcome in result.outcomes.items()
        if outcome.state != "identical"
    ]


def _one_line(text: str) -> str:
    return re.sub(r"/\S*/", ".../", text.replace("|", "\\|").replace("\n", " "))
