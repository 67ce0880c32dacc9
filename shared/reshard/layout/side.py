"""All ranks of one side of a refit, with tensors that lie alike described once.

A model's layers repeat, so a few hundred groups describe what millions of (rank, tensor) entries
would. Coordinate space: global regions, group ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reshard.dtypes import DType
from reshard.errors import LayoutError
from reshard.ids import FQN, GroupRank
from reshard.layout.holding import RankLayout, TensorLayout
from reshard.layout.region import Region
from reshard.layout.sharding import Sharding

_Held = tuple[GroupRank, tuple[Region, ...]]

ByRank = tuple[_Held, ...]
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
        gathered = gather(layouts)
        if gathered.faults:
            raise LayoutError("the ranks' layouts do not fit together", gathered.faults.values())
        return gathered.side

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


@dataclass(frozen=True, slots=True)
class Holding:
    """Tensors that some ranks report alike.

    Attributes:
        names: canonical names; reports that share the very object are joined the fastest.
        shape: of each whole tensor, in elements.
        dtype: as in `TensorLayout`.
        by_rank: what each of these ranks holds or needs of each of these tensors.
    """

    names: tuple[FQN, ...]
    shape: tuple[int, ...]
    dtype: DType
    by_rank: ByRank


@dataclass(frozen=True, slots=True)
class Gathered:
    """Reports of ranks, joined.

    Attributes:
        side: what fits together.
        faults: one for each tensor that does not, which the side leaves out; sorted by name.
    """

    side: SideLayout
    faults: Mapping[FQN, str]


def lying_alike(
    layout: RankLayout,
) -> dict[tuple[tuple[int, ...], DType, tuple[Region, ...]], list[FQN]]:
    """A rank's tensors by shape, dtype and held regions."""
    found: dict[tuple[tuple[int, ...], DType, tuple[Region, ...]], list[FQN]] = defaultdict(list)
    for tensor in layout.tensors:
        found[tensor.shape, tensor.dtype, tensor.regions].append(tensor.name)
    return found


def gather(layouts: Iterable[RankLayout]) -> Gathered:
    """Join the ranks' reports, given tensor by tensor."""
    shared: dict[tuple[FQN, ...], tuple[FQN, ...]] = {}
    holdings = []
    for layout in layouts:
        for (shape, dtype, regions), listed in lying_alike(layout).items():
            names = tuple(listed)
            names = shared.setdefault(names, names)
            holdings.append(Holding(names, shape, dtype, ((layout.rank, regions),)))
    return gather_groups(holdings)


def gather_groups(holdings: Sequence[Holding]) -> Gathered:
    """Join reports: tensors that occur in the same of them lie alike, and are joined once.

    The cost is that of the distinct lists of names, not of their repetition by rank.
    """
    reports: dict[int, list[Holding]] = defaultdict(list)
    for holding in holdings:
        reports[id(holding.names)].append(holding)
    lists: dict[FQN, list[int]] = defaultdict(list)
    for number, same in reports.items():
        for name in same[0].names:
            lists[name].append(number)
    together: dict[tuple[int, ...], list[FQN]] = defaultdict(list)
    for name, numbers in lists.items():
        together[tuple(numbers)].append(name)
    groups: list[TensorGroup] = []
    faults: dict[FQN, str] = {}
    for occurrences, names in together.items():
        found, fault = _joined([each for number in occurrences for each in reports[number]])
        if fault:
            faults.update((name, f"{name}: {fault}") for name in names)
            continue
        groups += (TensorGroup(tuple(names), *key, tuple(held)) for key, held in found.items())
    return Gathered(SideLayout(tuple(groups)), dict(sorted(faults.items())))


def _joined(
    holdings: Sequence[Holding],
) -> tuple[dict[tuple[tuple[int, ...], DType], list[_Held]], str]:
    """What is held of the same tensors, by shape and dtype; and the fault, where there is one."""
    found: dict[tuple[tuple[int, ...], DType], list[_Held]] = defaultdict(list)
    seen: set[tuple[DType, GroupRank]] = set()
    fault = ""
    for holding in holdings:
        found[holding.shape, holding.dtype] += holding.by_rank
        for rank, _ in holding.by_rank:
            if (holding.dtype, rank) in seen:
                fault = f"rank {rank} reports it twice"
            seen.add((holding.dtype, rank))
    for dtype in {dtype for _, dtype in found}:
        shapes = {shape: held for (shape, of), held in found.items() if of == dtype}
        if len(shapes) > 1:
            fault = f"ranks disagree on the shape: {_shapes(shapes)}"
    return found, fault


def _shapes(
    by_shape: Mapping[tuple[int, ...], Sequence[_Held]],
) -> str:
    ranks = {shape: sorted(rank for rank, _ in held) for shape, held in by_shape.items()}
    ordered = sorted(ranks.items(), key=lambda each: each[1])
    return ", ".join(f"{shape} on {_ranks(which)}" for shape, which in ordered)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:4]))}" + (", ..." if len(ranks) > 4 else "")
