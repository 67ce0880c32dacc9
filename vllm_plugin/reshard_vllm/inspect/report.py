"""All ranks' reports as one: for people, and for programs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from reshard_vllm.inspect.messages import Place, RankReport

Json = dict[str, object]

_MANY: Final = 8


def as_json(reports: Sequence[RankReport]) -> Json:
    """One object: sums over ranks, and per checkpoint tensor where it lands on each rank.

    `bit_identical` is null where nothing was compared. A tensor is `unused` if no rank takes it.
    """
    return {
        "model_class": reports[0].model_class,
        "ranks": len(reports),
        "basis": reports[0].basis,
        "direct_bytes": sum(report.direct_bytes for report in reports),
        "repacked_bytes": sum(report.repacked_bytes for report in reports),
        "computed_bytes": sum(report.computed_bytes for report in reports),
        "refused": _merged(reports, "refused"),
        "excess": _merged(reports, "excess"),
        "uncovered": _merged(reports, "uncovered"),
        "unused": sorted(unused(reports)),
        "bit_identical": bit_identical(reports),
        "differences": {str(r.rank): list(r.differences) for r in reports if r.differences},
        "tensors": {
            name: [
                {
                    "rank": rank,
                    "parameter": place.parameter,
                    "class": place.kind,
                    "dtype": place.dtype,
                    "regions": [
                        {"offset": list(offset), "shape": list(shape)}
                        for offset, shape in place.boxes
                    ],
                }
                for rank, place in places
            ]
            for name, places in sorted(_by_tensor(reports).items())
        },
    }


def as_text(reports: Sequence[RankReport]) -> str:
    """A table of checkpoint tensors, then shares, refusals and the proof."""
    return "\n".join([*_table(reports), "", *_shares(reports), *_problems(reports)])


def bit_identical(reports: Sequence[RankReport]) -> bool | None:
    """Whether every rank came out as vLLM's own loading makes it; None if not compared."""
    if not all(report.verified for report in reports):
        return None
    return not any(report.differences for report in reports)


def unused(reports: Iterable[RankReport]) -> set[str]:
    """Checkpoint tensors that no rank takes."""
    sets = [set(report.unused) for report in reports]
    return set.intersection(*sets) if sets else set()


def _by_tensor(reports: Iterable[RankReport]) -> dict[str, list[tuple[int, Place]]]:
    tensors: dict[str, list[tuple[int, Place]]] = {}
    for report in reports:
        for name, places in report.tensors.items():
            tensors.setdefault(name, []).extend((report.rank, place) for place in places)
    return tensors


def _merged(reports: Iterable[RankReport], field: str) -> dict[str, object]:
    """What one field says of all ranks, by parameter; the first rank to say it counts."""
    merged: dict[str, object] = {}
    for report in reports:
        of_rank: Mapping[str, object] = getattr(report, field)
        for key, value in of_rank.items():
            merged.setdefault(key, value)
    return merged


def _table(reports: Sequence[RankReport]) -> list[str]:
    rows = []
    for name, places in sorted(_by_tensor(reports).items()):
        for parameter in dict.fromkeys(place.parameter for _, place in places):
            of_parameter = [(rank, p) for rank, p in places if p.parameter == parameter]
            kinds = "/".join(dict.fromkeys(p.kind for _, p in of_parameter))
            ranks = ",".join(str(rank) for rank in dict.fromkeys(rank for rank, _ in of_parameter))
            rows.append((name, parameter, kinds, of_parameter[0][1].dtype, ranks))
    head = ("checkpoint tensor", "parameter", "class", "dtype", "ranks")
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def _shares(reports: Sequence[RankReport]) -> list[str]:
    counts = {
        kind: sum(getattr(report, f"{kind}_bytes") for report in reports)
        for kind in ("direct", "repacked", "computed", "refused")
    }
    total = sum(counts.values()) or 1
    shares = ", ".join(f"{kind} {100 * n / total:.1f} %" for kind, n in counts.items() if n)
    first = reports[0]
    return [
        f"{first.model_class} on {len(reports)} rank{'s' if len(reports) > 1 else ''}, "
        f"proven by {first.basis}: {sum(counts.values())} bytes received, {shares}"
    ]


def _problems(reports: Sequence[RankReport]) -> list[str]:
    lines = [f"refused {key}: {why}" for key, why in _merged(reports, "refused").items()]
    lines += [
        f"uncovered {key}: {count} elements get no checkpoint tensor"
        for key, count in _merged(reports, "uncovered").items()
    ]
    lines += [
        f"travels beyond what {key} keeps: {why}" for key, why in _merged(reports, "excess").items()
    ]
    ignored = sorted(unused(reports))
    if ignored:
        more = f" and {len(ignored) - _MANY} more" if len(ignored) > _MANY else ""
        lines.append(f"unused: {', '.join(ignored[:_MANY])}{more}")
    for report in reports:
        lines += [f"rank {report.rank} differs: {line}" for line in report.differences]
    same = bit_identical(reports)
    verdict = {
        True: "bit-identical to vLLM's own loading, on every rank",
        False: "NOT identical to vLLM's own loading",
        None: "not compared with vLLM's own loading",
    }[same]
    return [*lines, verdict]
