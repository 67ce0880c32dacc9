"""A plan as one self-contained page: tiles by owner, flows between ranks, bytes against bounds.

The page is a template, a style and a script that stand beside this module; Python contributes the
numbers. Nothing is loaded from anywhere.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.resources import files

from reshard.ids import GroupRank
from reshard.layout.boxes import partition
from reshard.layout.region import Region
from reshard.layout.side import ByRank
from reshard.plan.case import Case
from reshard.plan.model import TransferPlan
from reshard.plan.report import amount, describe, rank_list


def as_page(case: Case, plan: TransferPlan) -> str:
    """The page, as HTML."""
    here = files(__package__)
    page = here.joinpath("template.html").read_text(encoding="utf-8")
    for placeholder, text in (
        ("/*style*/", here.joinpath("style.css").read_text(encoding="utf-8")),
        ("/*script*/", here.joinpath("script.js").read_text(encoding="utf-8")),
        # Numbers go in last: a tensor's name may hold anything, a placeholder included.
        ("/*drawing*/", _script_safe(json.dumps(_drawing(case, plan), separators=(",", ":")))),
    ):
        page = page.replace(placeholder, text)
    return page


def _script_safe(text: str) -> str:
    """JSON that cannot end the element that it stands in."""
    return text.replace("<", "\\u003c")


def _drawing(case: Case, plan: TransferPlan) -> Mapping[str, object]:
    return {
        "digest": plan.digest,
        "redundancy": f"{plan.redundancy:.3f}",
        "kept": plan.kept_bytes,
        "bounds": {
            "sent": plan.bounds.max_sent_bytes,
            "received": plan.bounds.max_received_bytes,
        },
        "sources": _loads(case.source_ranks, plan.sent_bytes),
        "destinations": _loads(case.destination_ranks, plan.received_bytes),
        "flows": _flows(plan),
        "tensors": [_tensors(case, plan, index) for index in range(len(plan.classes))],
        "summary": _summary(case, plan),
    }


def _summary(case: Case, plan: TransferPlan) -> str:
    count = len(case.tensors)
    return (
        f"{count} tensor{'' if count == 1 else 's'} from ranks {rank_list(case.source_ranks)} to "
        f"ranks {rank_list(case.destination_ranks)}: {amount(sum(plan.received_bytes.values()))} "
        "to move"
    )


def _loads(ranks: Iterable[GroupRank], nbytes: Mapping[GroupRank, int]) -> list[list[int]]:
    return [[rank, nbytes.get(rank, 0)] for rank in ranks]


def _flows(plan: TransferPlan) -> list[list[int]]:
    """[source, destination, bytes]; a rank's own overlap too."""
    flows: dict[tuple[GroupRank, GroupRank], int] = defaultdict(int)
    for op in plan.ops:
        for destination in op.destinations:
            flows[op.source, destination] += plan.bytes_each(op)
    return [[*pair, nbytes] for pair, nbytes in sorted(flows.items())]


def _tensors(case: Case, plan: TransferPlan, index: int) -> Mapping[str, object]:
    tensors = plan.classes[index]
    example = next(t for t in case.tensors if t.name == tensors.names[0])
    return {
        "names": tensors.names,
        "shape": tensors.shape,
        "source_dtype": tensors.source_dtype,
        "wire_dtype": tensors.wire_dtype,
        "element": plan.element_bytes(index),
        "source": describe(example.source),
        "destination": describe(example.destination),
        "held": _tiles(tensors.held),
        "needed": _tiles(tensors.needed),
        "ops": [
            [op.source, op.destinations, op.first, op.last, *_corner(op.region)]
            for op in plan.ops
            if op.tensors == index
        ],
    }


def _tiles(by_rank: ByRank) -> list[list[object]]:
    """[owners, offset, shape] of each disjoint tile."""
    held = [(rank, region) for rank, regions in by_rank for region in regions]
    return [
        [sorted({held[i][0] for i in members}), *_corner(box)]
        for box, members in partition([region for _, region in held])
    ]


def _corner(region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return region.offset, region.shape
