"""Demands: which region which destinations must get, and who could send it.

Pure geometry over one class of tensors. What the sources hold is cut into atoms once, and atoms are
looked up by bisection: no rank is compared with every other.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.ids import GroupRank
from reshard.layout.boxes import BoxIndex, merge, missing, partition, union
from reshard.layout.region import Region
from reshard.layout.side import ByRank, alike
from reshard.plan.classes import TensorClass
from reshard.plan.senders import Ranks

_SHOWN = 8
"""Most regions that a message spells out."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A region of each tensor of a class that some destinations need.

    Attributes:
        region: global; all of it is held by each of `holders`.
        holders: the ranks that may send it.
        destinations: the ranks that need it; equal to `holders`, one rank, where a rank keeps what
            it holds itself.
    """

    region: Region
    holders: Ranks
    destinations: Ranks

    @property
    def stays(self) -> bool:
        """Whether it is a rank's own overlap, which does not travel."""
        return self.holders == self.destinations


class Atoms:
    """What the sources hold of a tensor, cut into boxes, each with all ranks that hold it."""

    def __init__(self, held: ByRank) -> None:
        ranks: dict[Region, list[GroupRank]] = defaultdict(list)
        for rank, regions in held:
            for region in regions:
                ranks[region].append(rank)
        distinct = list(ranks)
        self._boxes: list[Region] = []
        self._holders: list[Ranks] = []
        for box, members in partition(distinct):
            holders = {rank for member in members for rank in ranks[distinct[member]]}
            self._boxes.append(box)
            self._holders.append(tuple(sorted(holders)))
        self._index = BoxIndex(self._boxes)

    def within(self, region: Region) -> list[tuple[Region, Ranks]]:
        """The parts of `region` that somebody holds; few: what one rank can send is one part."""
        parts: dict[Ranks, list[Region]] = defaultdict(list)
        for i, common in self._index.meeting(region):
            parts[self._holders[i]].append(common)
        return [(box, holders) for holders, boxes in parts.items() for box in merge(boxes)]


def demands(tensors: TensorClass, atoms: Atoms) -> tuple[list[Demand], list[str]]:
    """Every destination element once, each region with all of its holders.

    Args:
        tensors: the class.
        atoms: of `tensors.held`.

    Returns:
        the demands, and a fault for each destination that needs an element twice or one that
        nobody holds.
    """
    alike_ranks: dict[tuple[Region, ...], list[GroupRank]] = defaultdict(list)
    for rank, regions in tensors.needed:
        alike_ranks[regions].append(rank)
    found: list[Demand] = []
    faults: list[str] = []
    for regions, ranks in alike_ranks.items():
        faults += _overlaps(tensors, ranks, regions)
        for region in regions:
            parts = atoms.within(region)
            if sum(part.volume for part, _ in parts) != region.volume:
                faults.append(_hole(tensors, ranks, region, [part for part, _ in parts]))
            for part, holders in parts:
                found += _split(part, holders, ranks)
    return found, faults


def _split(region: Region, holders: Ranks, ranks: Sequence[GroupRank]) -> list[Demand]:
    """Ranks that hold the region keep it; the others get it from some holder."""
    holding = set(holders)
    kept = [Demand(region, (rank,), (rank,)) for rank in ranks if rank in holding]
    others = tuple(rank for rank in ranks if rank not in holding)
    return [*kept, Demand(region, holders, others)] if others else kept


def _overlaps(
    tensors: TensorClass, ranks: Sequence[GroupRank], regions: Sequence[Region]
) -> list[str]:
    if len(regions) == 1:
        return []
    asked = sum(region.volume for region in regions)
    distinct = sum(region.volume for region in union(regions))
    if asked == distinct:
        return []
    return [
        f"{alike(tensors.names)}: destination {_ranks(ranks)} for {asked - distinct} elements "
        f"twice in {_text(regions)}"
    ]


def _hole(
    tensors: TensorClass, ranks: Sequence[GroupRank], region: Region, parts: Sequence[Region]
) -> str:
    return (
        f"{alike(tensors.names)}: destination {_ranks(ranks)} for {_text(missing(region, parts))}, "
        "which no source rank holds"
    )


def _ranks(ranks: Sequence[GroupRank]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} asks"
    return f"ranks {', '.join(map(str, ranks))} ask"


def _text(regions: Sequence[Region]) -> str:
    more = len(regions) - _SHOWN
    shown = ", ".join(map(str, regions[:_SHOWN]))
    return shown + (f" and {more} regions more" if more > 0 else "")
