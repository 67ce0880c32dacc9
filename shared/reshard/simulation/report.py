"""Predictions as tables for people and as plain values for programs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from reshard.simulation.machine import Machine
from reshard.simulation.methods import Prediction
from reshard.simulation.published import PUBLISHED, Published

Json = Mapping[str, object]
"""A JSON object."""


def as_json(predictions: Iterable[Prediction], machine: Machine) -> Json:
    """All methods by name, and the machine."""
    return {
        "machine": asdict(machine),
        "methods": {
            each.method: {
                "seconds": each.seconds,
                "received_bytes": each.received_bytes,
                "needed_bytes": each.needed_bytes,
                "redundancy": each.redundancy,
                "phases": [{**asdict(phase), "seconds": phase.seconds} for phase in each.phases],
            }
            for each in predictions
        },
    }


def as_text(predictions: Iterable[Prediction]) -> str:
    """A table: a line a method, and under it a line a phase."""
    lines = [
        f"{'method':<28} {'seconds':>9} {'redundancy':>11}   "
        f"{'wire':>8} {'latency':>8} {'copies':>8} {'host':>8}  busiest"
    ]
    for each in predictions:
        lines.append(f"{each.method:<28} {each.seconds:>9.3f} {each.redundancy:>11.3f}")
        lines += (
            f"  {phase.name:<26} {phase.seconds:>9.3f} {'':>11}   "
            f"{phase.wire_seconds:>8.3f} {phase.latency_seconds:>8.3f} "
            f"{phase.copy_seconds:>8.3f} {phase.host_seconds:>8.3f}  {phase.busiest}"
            for phase in each.phases
        )
    return "\n".join(lines)


def published_rows() -> Iterator[tuple[Published, Prediction, Prediction]]:
    """Each published figure, its prediction, and that of our plan."""
    for row in PUBLISHED:
        yield (row, *row.predict())


def published_table() -> str:
    """The table of `docs/performance.md`, in Markdown."""
    lines = [
        "| model | method | trainer to engine | nodes | published, s | predicted, s | "
        "predicted / published | our plan, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, theirs, ours in published_rows():
        shown = _range(row.fastest, row.slowest, 2)
        low, high = theirs.seconds / row.slowest, theirs.seconds / row.fastest
        method = f"[{row.method}]({row.source})" if row.source else f"{row.method} (no source)"
        lines.append(
            f"| {row.model} | {method} | {row.trainer} to {row.engine} | "
            f"{row.nodes} | {shown} | {theirs.seconds:.2f} | {_range(low, high, 2)} | "
            f"{ours.seconds:.2f} |"
        )
    return "\n".join(lines)


def _range(low: float, high: float, digits: int) -> str:
    first, last = f"{low:.{digits}f}", f"{high:.{digits}f}"
    return first if first == last else f"{first} to {last}"
