"""From samples to figures: medians over all rounds, their spread, ratios. Not here: tables."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import cast

from benchmarks.refit.ranks import Turn

BASELINE = "broadcast"
LIMIT = "limit"

Figures = dict[str, object]


def figures(by_rank: Sequence[Sequence[Turn]]) -> dict[str, Figures]:
    """One entry a method.

    Args:
        by_rank: the turns of each trainer rank, in the same order on all.
    """
    names = list(dict.fromkeys(turn.method for turn in by_rank[0]))
    measured = {name: _method(name, by_rank) for name in names}
    for entry in measured.values():
        entry["ratio_to_broadcast"] = _ratio(measured.get(BASELINE), entry)
        entry["ratio_to_limit"] = _ratio(measured.get(LIMIT), entry)
    return measured


def _method(name: str, by_rank: Sequence[Sequence[Turn]]) -> Figures:
    turns = [[turn for turn in rank if turn.method == name] for rank in by_rank]
    # The slowest rank's, sample by sample.
    samples = [
        _slowest([sample.seconds for sample in same])
        for same in zip(
            *([s for turn in rank for s in turn.samples] for rank in turns), strict=True
        )
    ]
    phases = sorted({phase for sample in samples for phase in sample})
    received = turns[0][0].samples[0].received
    seconds = {phase: spread([sample.get(phase, 0.0) for sample in samples]) for phase in phases}
    return {
        "seconds": seconds,
        "bytes_moved": list(received),
        "redundancy": sum(received) / sum(turns[0][0].shard_bytes),
        "peak_extra_bytes": {
            "trainer": [max(turn.extra_bytes for turn in rank) for rank in turns],
            "engine": [
                max(each) for each in zip(*(t.engine_extra_bytes for t in turns[0]), strict=True)
            ],
        },
        "engine_pause": seconds.pop("engine pause"),
        "trainer_stall": seconds.pop("trainer stall"),
        "open_seconds": median(turn.open_seconds for turn in turns[0]),
        "equal": all(turn.equal for turn in turns[0]),
        "refits": len(samples),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": median(values), "least": min(values), "most": max(values)}


def _slowest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    phases = {phase for seconds in ranks for phase in seconds}
    return {phase: max(seconds.get(phase, 0.0) for seconds in ranks) for phase in phases}


def _ratio(reference: Figures | None, entry: Figures) -> float | None:
    """How many times as fast as the reference, if that was measured."""
    return _total(reference) / _total(entry) if reference is not None else None


def _total(entry: Figures) -> float:
    return median_of(cast(dict[str, object], entry["seconds"])["total"])


def median_of(values: object) -> float:
    """The median of what `spread` returned."""
    return cast(dict[str, float], values)["median"]
