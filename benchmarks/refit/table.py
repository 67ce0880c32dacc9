"""A run's figures as tables: for a terminal, and for the documentation."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table

from benchmarks.refit.results import Figures, median_of

_COLUMNS = (
    "method",
    "seconds",
    "least-most",
    "x broadcast",
    "of limit",
    "pause, ms",
    "stall, ms",
    "MB moved",
    "redundancy",
    "extra MB, trainer / engine",
    "equal",
)
_CAPTION = (
    "seconds: until the engine serves the new weights, median; x broadcast: how many times as "
    "fast; of limit: share of the speed of plain copies; extra: most memory of a rank beside the "
    "weights. In row limit, seconds, pause and stall are plain copies: with cast into the engine's "
    "shard, without cast, with cast of the trainer's shard."
)
_GOAL_COLUMNS = ("goal", "wanted", "got", "met")
_PHASES = {
    "broadcast": ("gather", "send", "engine receive", "engine load"),
    "checkpoint": ("gather", "save", "engine load"),
    "reshard": (
        "transfer/stage",
        "begin",
        "transfer",
        "transfer/copy",
        "pause",
        "commit",
        "commit/commit",
        "finish",
        "reset",
        "resume",
    ),
}
"""The steps that are shown, by the first word of a method; all of them are in the JSON file."""


def show(result: Mapping[str, object]) -> None:
    """Print the tables."""
    console = Console(width=170)
    for title, columns, rows, caption in _tables(result):
        table = Table(*columns, title=title, caption=caption)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def write(result: Mapping[str, object], document: Path) -> None:
    """Put the tables into a document, between its marks.

    Raises:
        ValueError: the document has no such marks.
    """
    first, last = "<!-- refits -->\n", "<!-- end of refits -->\n"
    text = document.read_text()
    before, found, rest = text.partition(first)
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise ValueError(f"{document} has no lines {first.strip()!r} and {last.strip()!r}")
    document.write_text(before + first + "\n" + "\n".join(_markdown(result)) + "\n" + last + after)


def _markdown(result: Mapping[str, object]) -> Iterator[str]:
    machine = cast(Mapping[str, object], result["machine"])
    yield (
        f"{result['date']}, {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['system']}, Python {machine['python']}, torch "
        f"{machine['torch']}; load {machine['load_before']} when it began; {result['rounds']} "
        f"rounds; {result['shape']}, linears {result['linears']}."
    )
    for _, columns, rows, _ in _tables(result):
        yield ""
        yield f"| {' | '.join(columns)} |"
        yield f"|---|{'---:|' * (len(columns) - 1)}"
        yield from (f"| {' | '.join(row)} |" for row in rows)


_Rows = list[tuple[str, ...]]


def _tables(
    result: Mapping[str, object],
) -> Iterator[tuple[str, Sequence[str], _Rows, str]]:
    """Title, columns, rows and caption of each table."""
    measured = cast(Mapping[str, Figures], result["methods"])
    title = (
        f"{result['shape']}, {result['trainer_ranks']} FSDP2 ranks (fp32) -> vLLM TP "
        f"{result['engine_ranks']} (bf16), linears {result['linears']}"
    )
    yield title, _COLUMNS, [_row(name, entry) for name, entry in measured.items()], _CAPTION
    for kind, phases in _PHASES.items():
        rows = [_steps(n, e, phases) for n, e in measured.items() if n.startswith(kind)]
        if rows:
            yield f"{kind}, by step, ms", ("method", *phases), rows, ""
    goals = cast(list[dict[str, object]], result["goals"])
    if goals:
        rows = [
            (str(g["goal"]), str(g["wanted"]), f"{g['got']:.3g}", "yes" if g["met"] else "no")
            for g in goals
        ]
        yield "goals", _GOAL_COLUMNS, rows, ""


def _row(name: str, entry: Figures) -> tuple[str, ...]:
    total = _seconds(entry)["total"]
    extra = cast(dict[str, list[int]], entry["peak_extra_bytes"])
    return (
        name,
        f"{total['median']:.3f}",
        f"{total['least']:.3f}-{total['most']:.3f}",
        _shown(entry["ratio_to_broadcast"], 1),
        _shown(entry["ratio_to_limit"], 2),
        f"{1e3 * median_of(entry['engine_pause']):.0f}",
        f"{1e3 * median_of(entry['trainer_stall']):.0f}",
        f"{sum(cast(list[int], entry['bytes_moved'])) / 1e6:.0f}",
        f"{cast(float, entry['redundancy']):.3f}",
        f"{max(extra['trainer']) / 1e6:.0f} / {max(extra['engine']) / 1e6:.0f}",
        "yes" if entry["equal"] else "NO",
    )


def _steps(name: str, entry: Figures, phases: Sequence[str]) -> tuple[str, ...]:
    seconds = _seconds(entry)
    shown = (f"{1e3 * seconds[p]['median']:.0f}" if p in seconds else "-" for p in phases)
    return (name, *shown)


def _seconds(entry: Figures) -> dict[str, dict[str, float]]:
    return cast(dict[str, dict[str, float]], entry["seconds"])


def _shown(ratio: object, digits: int) -> str:
    return "-" if ratio is None else f"{ratio:.{digits}f}"
