"""Plans as text for people and as plain values for programs."""

from collections.abc import Iterator, Mapping, Sequence

from reshard.dtypes import itemsize
from reshard.ids import GroupRank
from reshard.layout.region import Region
from reshard.layout.sharding import Sharding
from reshard.plan.case import Case, CaseTensor
from reshard.plan.model import Transfer, TransferPlan

Json = Mapping[str, object]
"""A JSON object."""

_SHOWN_TRANSFERS = 200
"""Most transfers that the table spells out."""

_SHOWN_REGIONS = 4


def as_json(case: Case, plan: TransferPlan) -> Json:
    """The plan as plain values: ranks are strings where they are keys."""
    return {
        "digest": plan.digest,
        "redundancy": plan.redundancy,
        "received_bytes": _by_rank(case.destination_ranks, plan.received_bytes),
        "sent_bytes": _by_rank(case.source_ranks, plan.sent_bytes),
        "bounds": {
            "max_received_bytes": plan.bounds.max_received_bytes,
            "max_sent_bytes": plan.bounds.max_sent_bytes,
        },
        "transfers": _transfers(plan),
    }


def _by_rank(ranks: Sequence[GroupRank], nbytes: Mapping[GroupRank, int]) -> dict[str, int]:
    return {str(rank): nbytes.get(rank, 0) for rank in ranks}


def _transfers(plan: TransferPlan) -> list[Json]:
    size = {name: itemsize(c.wire_dtype) for c in plan.classes for name in c.names}
    return [_transfer(transfer, size[transfer.name]) for transfer in plan.transfers()]


def _transfer(transfer: Transfer, element_bytes: int) -> Json:
    return {
        "tensor": transfer.name,
        "source_rank": transfer.source,
        "destination_rank": transfer.destination,
        "bytes": sum(region.volume for region in transfer.regions) * element_bytes,
        "regions": [
            {"offset": list(region.offset), "shape": list(region.shape)}
            for region in transfer.regions
        ],
    }


def as_text(case: Case, plan: TransferPlan) -> str:
    """The plan as a table with totals."""
    return "\n".join((*_transfer_lines(case, plan), *_rank_lines(case, plan), *_totals(plan)))


def _transfer_lines(case: Case, plan: TransferPlan) -> Iterator[str]:
    described = {tensor.name: tensor for tensor in case.tensors}
    size = {name: c.wire_dtype for c in plan.classes for name in c.names}
    current, shown = "", 0
    for transfer in plan.transfers():
        if shown == _SHOWN_TRANSFERS:
            yield f"  ... the first {shown} transfers: --json lists all, --html draws them"
            break
        if transfer.name != current:
            current = transfer.name
            yield from _heading(described[transfer.name])
        shown += 1
        nbytes = sum(region.volume for region in transfer.regions) * itemsize(size[transfer.name])
        arrow = "keeps" if transfer.source == transfer.destination else f"-> {transfer.destination}"
        yield f"  {transfer.source:>5} {arrow:<9} {amount(nbytes):>10}  {_text(transfer.regions)}"
    if shown:
        yield ""


def _heading(tensor: CaseTensor) -> Iterator[str]:
    cast = "" if tensor.source_dtype == tensor.wire_dtype else f" -> {tensor.wire_dtype}"
    yield f"{tensor.name}  {list(tensor.source.shape)}  {tensor.source_dtype}{cast}"
    yield f"  source       {describe(tensor.source)}"
    yield f"  destination  {describe(tensor.destination)}"


def describe(sharding: Sharding) -> str:
    """A sharding in a few words: `mesh 2 x 4, ranks 0-7, R S1`."""
    mesh = " x ".join(map(str, sharding.mesh.shape))
    placements = " ".join(map(str, sharding.placements))
    return f"mesh {mesh or '()'}, ranks {rank_list(sharding.mesh.ranks)}, {placements or '()'}"


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks with intervals joined, in the given order.

    >>> rank_list((0, 1, 2, 3, 8, 6, 7))
    '0-3, 8, 6-7'
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _text(regions: Sequence[Region]) -> str:
    more = len(regions) - _SHOWN_REGIONS
    shown = " ".join(map(str, regions[:_SHOWN_REGIONS]))
    return shown + (f" and {more} more" if more > 0 else "")


def _rank_lines(case: Case, plan: TransferPlan) -> Iterator[str]:
    ranks = sorted({*case.source_ranks, *case.destination_ranks})
    yield f"{'rank':>6} {'sends':>12} {'receives':>12}"
    for rank in ranks:
        sent = amount(plan.sent_bytes.get(rank, 0)) if rank in case.source_ranks else "-"
        got = amount(plan.received_bytes.get(rank, 0)) if rank in case.destination_ranks else "-"
        yield f"{rank:>6} {sent:>12} {got:>12}"
    yield ""


def _totals(plan: TransferPlan) -> Iterator[str]:
    total = sum(plan.received_bytes.values())
    yield f"moved              {amount(total)}, and {amount(plan.kept_bytes)} kept in place"
    yield f"redundancy         {plan.redundancy:.3f} (bytes received / bytes needed)"
    for label, by_rank, bound in (
        ("busiest receiver", plan.received_bytes, plan.bounds.max_received_bytes),
        ("busiest sender", plan.sent_bytes, plan.bounds.max_sent_bytes),
    ):
        most = max(by_rank.values(), default=0)
        ratio = f"{most / bound:.3f} x the least possible" if bound else "nothing to move"
        yield f"{label:<18} {amount(most)}, {ratio}"
    yield f"digest             {plan.digest}"


def amount(nbytes: int) -> str:
    """Bytes for people: exact up to 10 KiB, then three digits.

    >>> amount(128), amount(3 << 20)
    ('128 B', '3.00 MiB')
    """
    if nbytes < 10 * 1024:
        return f"{nbytes} B"
    power = min((nbytes.bit_length() - 1) // 10, 5)
    value = nbytes / 1024**power
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {'KMGTP'[power - 1]}iB"
