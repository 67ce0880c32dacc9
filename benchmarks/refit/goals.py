"""What refits on one host are meant to reach, and what a run reached."""

from collections.abc import Iterator, Mapping
from typing import cast

from benchmarks.refit.results import LIMIT, Figures, median_of

GOALS = {
    "gloo": 6.0,
    "shm snapshot": 10.0,
    "shm live": 25.0,
}
"""Times as fast as `broadcast`, the better kind of install."""

LEAST_OF_LIMIT = 0.7
MOST_COPIES = 1.3
MOST_LEASED = 0.1
INSTALLS = ("staged", "in_place")


def judge(measured: Mapping[str, Figures]) -> list[dict[str, object]]:
    """Each goal, what the run has to say to it, and whether it is met; for a run of all methods."""
    rows = [*_speed(measured), *_copies(measured)]
    worst = max(cast(float, each["redundancy"]) for each in _ours(measured))
    rows.append(_row("redundancy", "1.000", worst, met=worst == 1.0))
    return rows


def _speed(measured: Mapping[str, Figures]) -> Iterator[dict[str, object]]:
    for way, least in GOALS.items():
        got = max(_ratio(measured, way, each, "ratio_to_broadcast") for each in INSTALLS)
        yield _row(f"{way}: x broadcast", f">= {least:g}", got, met=got >= least)
    got = max(_ratio(measured, "shm live", each, "ratio_to_limit") for each in INSTALLS)
    wanted = f">= {LEAST_OF_LIMIT:g}"
    yield _row("shm live: of limit", wanted, got, met=got >= LEAST_OF_LIMIT)


def _copies(measured: Mapping[str, Figures]) -> Iterator[dict[str, object]]:
    """Pauses and stalls, in plain copies of the same shard."""
    limit = measured[LIMIT]
    shard, masters = median_of(limit["engine_pause"]), median_of(limit["trainer_stall"])
    for way in GOALS:
        entry = measured[f"reshard {way}, staged"]
        got = median_of(entry["engine_pause"]) / shard
        wanted = f"<= {MOST_COPIES:g}"
        yield _row(f"{way}, staged: engine pause, in copies", wanted, got, met=got <= MOST_COPIES)
    for way, most in (("shm snapshot", MOST_COPIES), ("shm live", MOST_LEASED)):
        entry = measured[f"reshard {way}, staged"]
        got = median_of(entry["trainer_stall"]) / masters
        wanted = f"<= {most:g}"
        yield _row(f"{way}: trainer stall, in copies", wanted, got, met=got <= most)


def _row(goal: str, wanted: str, got: float, *, met: bool) -> dict[str, object]:
    return {"goal": goal, "wanted": wanted, "got": got, "met": met}


def _ratio(measured: Mapping[str, Figures], way: str, install: str, key: str) -> float:
    return cast(float, measured[f"reshard {way}, {install}"][key])


def _ours(measured: Mapping[str, Figures]) -> list[Figures]:
    return [entry for name, entry in measured.items() if name.startswith("reshard")]
