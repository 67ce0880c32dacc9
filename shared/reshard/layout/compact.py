"""Layouts as they travel: names as patterns, layouts that several ranks or tensors share once.

A rank's report and a whole side have the same form. Coordinate space: global regions, group ranks.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from reshard.dtypes import DType
from reshard.errors import LayoutError
from reshard.ids import FQN, GroupRank
from reshard.layout.holding import RankLayout
from reshard.layout.names import (
    NamePattern,
    Runs,
    pack_names,
    pack_numbers,
    unpack_names,
    unpack_numbers,
)
from reshard.layout.region import Region
from reshard.layout.side import Gathered, Holding, SideLayout, gather_groups, lying_alike

MAX_RANKS = 1 << 20
"""Most ranks that share one layout."""

Boxes = tuple[tuple[int, ...], ...]
"""Regions: the offset and then the shape of each."""


@dataclass(frozen=True, slots=True)
class CompactGroup:
    """Tensors of equal shape and dtype that lie alike.

    Attributes:
        names: canonical names.
        shape: of each whole tensor, in elements.
        dtype: as in `TensorLayout`.
        held: regions, and the group ranks that hold or need just these.
    """

    names: tuple[NamePattern, ...]
    shape: tuple[int, ...]
    dtype: DType
    held: tuple[tuple[Boxes, Runs], ...]


@dataclass(frozen=True, slots=True)
class CompactSide:
    """What one rank, or all ranks of a side, hold or need."""

    groups: tuple[CompactGroup, ...]

    @classmethod
    def of_rank(cls, layout: RankLayout) -> "CompactSide":
        """One rank's report."""
        return cls(
            tuple(
                CompactGroup(
                    pack_names(names), shape, dtype, ((_boxes(regions), (layout.rank, 1)),)
                )
                for (shape, dtype, regions), names in lying_alike(layout).items()
            )
        )

    @classmethod
    def of_side(cls, side: SideLayout) -> "CompactSide":
        """A whole side."""
        groups = []
        for group in side.groups:
            ranks: dict[tuple[Region, ...], list[int]] = defaultdict(list)
            for rank, regions in group.by_rank:
                ranks[regions].append(rank)
            held = tuple((_boxes(regions), pack_numbers(who)) for regions, who in ranks.items())
            groups.append(CompactGroup(pack_names(group.names), group.shape, group.dtype, held))
        return cls(tuple(groups))


def expand(sides: Iterable[CompactSide]) -> Gathered:
    """The reports of several ranks, or parts of a side, joined.

    Raises:
        LayoutError: malformed.
    """
    names: dict[tuple[NamePattern, ...], tuple[FQN, ...]] = {}
    regions: dict[Boxes, tuple[Region, ...]] = {}
    holdings = []
    for side in sides:
        for group in side.groups:
            # Most ranks list the same names and few different regions: each is expanded once.
            if group.names not in names:
                names[group.names] = unpack_names(group.names)
            for boxes, _ in group.held:
                if boxes not in regions:
                    regions[boxes] = tuple(map(_region, boxes))
            by_rank = tuple(
                (GroupRank(rank), regions[boxes])
                for boxes, runs in group.held
                for rank in _ranks(runs)
            )
            holdings.append(Holding(names[group.names], group.shape, group.dtype, by_rank))
    return gather_groups(holdings)


def _boxes(regions: tuple[Region, ...]) -> Boxes:
    return tuple((*region.offset, *region.shape) for region in regions)


def _region(box: tuple[int, ...]) -> Region:
    ndim, odd = divmod(len(box), 2)
    if odd:
        raise LayoutError(f"a region of {len(box)} numbers: expected an offset and a shape")
    return Region(box[:ndim], box[ndim:])


def _ranks(runs: Runs) -> tuple[int, ...]:
    if len(runs) % 2 or any(not 0 <= n < MAX_RANKS for n in runs):
        raise LayoutError(f"malformed runs of ranks {runs}")
    return unpack_numbers(runs)
