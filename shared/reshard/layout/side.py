"""All ranks of one side of a refit, with tensors that lie alike described once.

A model's layers repeat, so a few hundred groups describe what millions of (rank, tensor) entries
would. Coordinate space: global regions, group ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reshard.dtypes import DType
from reshard.errors import LayoutError
from reshard.ids import FQN, GroupRank
from reshard.layout.holding import RankLayout, TensorLayout
from reshard.layout.region import Region
from reshard.layout.sharding import Sharding

ByRank = tuple[tuple[GroupRank, tuple[Region, ...]], ...]
"""Regions by group rank, sorted by rank; ranks without any elements are left out."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of equal shape and dtype that lie alike.

    Attributes:
        names: canonical names; sorted.
        shape: of each whole tensor, in elements.
        dtype: as in `TensorLayout`.
        by_rank: what each rank holds or needs of each of these tensors.
    """

    names: tuple[FQN, ...]
    shape: tuple[int, ...]
    dtype: DType
    by_rank: ByRank

    def __post_init__(self) -> None:
        some = [
            (rank, tuple(region for region in regions if region.volume))
            for rank, regions in self.by_rank
        ]
        object.__setattr__(self, "names", tuple(sorted(self.names)))
        object.__setattr__(self, "by_rank", tuple(sorted(held for held in some if held[1])))

    @property
    def fault(self) -> str:
        """The regions that no tensor of `shape` has; empty if there are none."""
        wrong = [
            f"{region} on rank {rank}"
            for rank, regions in self.by_rank
            for region in regions
            if len(region.shape) != len(self.shape)
            or any(end > n for end, n in zip(region.end, self.shape, strict=True))
        ]
        if not wrong:
            return ""
        return f"{alike(self.names)} of shape {self.shape} has no regions {', '.join(wrong)}"


def alike(names: Sequence[FQN]) -> str:
    """Names of tensors that share a fault, for a message.

    >>> alike((FQN("a.weight"), FQN("b.weight"), FQN("c.weight")))
    'a.weight (and 2 alike)'
    """
    more = len(names) - 1
    return names[0] + (f" (and {more} alike)" if more else "")


@dataclass(frozen=True, slots=True)
class SideLayout:
    """What all ranks of one side hold (source) or need (destination).

    Attributes:
        groups: tensors that lie alike are in one group; sorted by name and dtype.
    """

    groups: tuple[TensorGroup, ...]

    def __post_init__(self) -> None:
        names: dict[tuple[tuple[int, ...], DType, ByRank], list[FQN]] = defaultdict(list)
        for group in self.groups:
            names[group.shape, group.dtype, group.by_rank] += group.names
        groups = (TensorGroup(tuple(together), *key) for key, together in names.items())
        ordered = tuple(sorted(groups, key=lambda group: (group.names, group.dtype)))
        object.__setattr__(self, "groups", ordered)

    @classmethod
    def from_shardings(
        cls, tensors: Iterable[tuple[Sequence[FQN], Sharding, DType]]
    ) -> "SideLayout":
        """All ranks of the shardings' meshes, without an object a rank and tensor.

        Args:
            tensors: names of tensors that lie alike, how they lie, and their dtype.
        """
        together: dict[tuple[Sharding, DType], list[FQN]] = defaultdict(list)
        for names, sharding, dtype in tensors:
            together[sharding, dtype] += names
        groups = []
        for (sharding, dtype), alike_names in together.items():
            by_rank = tuple((GroupRank(r), sharding.regions(r)) for r in sharding.mesh.ranks)
            groups.append(TensorGroup(tuple(alike_names), sharding.shape, dtype, by_rank))
        return cls(tuple(groups))

    @classmethod
    def from_ranks(cls, layouts: Iterable[RankLayout]) -> "SideLayout":
        """The ranks' own reports, joined.

        Raises:
            LayoutError: ranks that disagree on a shape, or report twice.
        """
        side, faults = gather(layouts)
        if faults:
            raise LayoutError("the ranks' layouts do not fit together", faults.values())
        return side

    def for_rank(self, rank: GroupRank) -> RankLayout:
        """The part of one rank, as it would report it; tensors without elements are left out."""
        tensors = [
            TensorLayout(name, group.shape, group.dtype, regions)
            for group in self.groups
            for holder, regions in group.by_rank
            if holder == rank
            for name in group.names
        ]
        return RankLayout(rank, tuple(sorted(tensors, key=lambda t: (t.name, t.dtype))))


def gather(layouts: Iterable[RankLayout]) -> tuple[SideLayout, dict[FQN, str]]:
    """Join the ranks' reports.

    Returns:
        what fits together, and a fault for each tensor that does not, which the side leaves out.
    """
    parts: dict[tuple[FQN, DType], dict[GroupRank, TensorLayout]] = defaultdict(dict)
    faults: dict[FQN, str] = {}
    for layout in layouts:
        for tensor in layout.tensors:
            ranks = parts[tensor.name, tensor.dtype]
            if layout.rank in ranks:
                faults[tensor.name] = f"{tensor.name}: rank {layout.rank} reports it twice"
            ranks[layout.rank] = tensor
    for (name, _), ranks in parts.items():
        if len({tensor.shape for tensor in ranks.values()}) > 1:
            faults[name] = f"{name}: ranks disagree on the shape: {_shapes(ranks)}"
    return SideLayout(_grouped(parts, faults)), dict(sorted(faults.items()))


def _shapes(ranks: dict[GroupRank, TensorLayout]) -> str:
    by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, tensor in sorted(ranks.items()):
        by_shape[tensor.shape].append(rank)
    return ", ".join(f"{shape} on {_ranks(which)}" for shape, which in by_shape.items())


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:4]))}" + (", ..." if len(ranks) > 4 else "")


def _grouped(
    parts: dict[tuple[FQN, DType], dict[GroupRank, TensorLayout]], faults: dict[FQN, str]
) -> tuple[TensorGroup, ...]:
    # A group's key holds numbers of regions, not regions: there are as many of these as ranks,
    # and the same few again and again.
    numbers: dict[tuple[Region, ...], int] = {}
    names: dict[tuple[tuple[int, ...], DType, tuple[tuple[int, int], ...]], list[FQN]]
    names = defaultdict(list)
    for (name, dtype), ranks in parts.items():
        if name in faults:
            continue
        held = tuple(
            (rank, numbers.setdefault(tensor.regions, len(numbers)))
            for rank, tensor in sorted(ranks.items())
        )
        shape = next(iter(ranks.values())).shape
        names[shape, dtype, held].append(name)
    regions = list(numbers)
    return tuple(
        TensorGroup(
            tuple(together),
            shape,
            dtype,
            tuple((GroupRank(rank), regions[number]) for rank, number in held),
        )
        for (shape, dtype, held), together in names.items()
    )
