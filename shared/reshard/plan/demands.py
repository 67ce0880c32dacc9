"""Demands: which region which destination must get, and who could send it.

Pure geometry over one class of tensors. The search is a sweep along the first dim, not a comparison
of all pairs of ranks.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import PlanError
from reshard.layout.boxes import subtract, union
from reshard.layout.region import Region
from reshard.plan.classes import ByRank, TensorClass


@dataclass(frozen=True, slots=True)
class Demand:
    """A region that one destination needs of each tensor of a class.

    Attributes:
        destination: group rank.
        region: global; all of it is held by each of `holders`.
        holders: group ranks that hold it, sorted; the destination itself where it holds it.
    """

    destination: int
    region: Region
    holders: tuple[int, ...]


def demands(tensors: TensorClass) -> tuple[Demand, ...]:
    """Every destination element once, each region with all of its holders.

    Raises:
        PlanError: a destination needs an element twice, or one that nobody holds, or one outside
            the tensor.
    """
    atoms = _Atoms(tensors.held)
    faults: list[str] = []
    found: list[Demand] = []
    for rank, regions in tensors.needed:
        faults += _overlaps(tensors, rank, regions)
        for region in regions:
            if not region.volume:
                continue
            parts = atoms.within(region)
            if sum(part.volume for part, _ in parts) != region.volume:
                faults += _holes(tensors, rank, region, [part for part, _ in parts])
            for part, holders in parts:
                found.append(Demand(rank, part, (rank,) if rank in holders else holders))
    if faults:
        raise PlanError("destination elements are not covered exactly once", faults)
    return tuple(found)


def _overlaps(tensors: TensorClass, rank: int, regions: Sequence[Region]) -> list[str]:
    asked = sum(region.volume for region in regions)
    distinct = sum(region.volume for region in union(regions))
    if asked == distinct:
        return []
    return [
        f"{_names(tensors)}: destination rank {rank} asks for {asked - distinct} elements twice in "
        f"{_text(regions)}"
    ]


def _holes(tensors: TensorClass, rank: int, region: Region, parts: Sequence[Region]) -> list[str]:
    missing = [region]
    for part in parts:
        missing = [rest for box in missing for rest in subtract(box, part)]
    return [
        f"{_names(tensors)}: {_text(missing)} is needed by destination rank {rank} and held by no "
        "source rank"
    ]


def _names(tensors: TensorClass) -> str:
    more = len(tensors.names) - 1
    return tensors.names[0] + (f" (and {more} alike)" if more else "")


def _text(regions: Sequence[Region]) -> str:
    return ", ".join(
        "[" + ", ".join(f"{o}:{e}" for o, e in zip(r.offset, r.end, strict=True)) + "]"
        for r in regions
    )


class _Atoms:
    """Disjoint regions of a tensor, each with all ranks that hold it."""

    def __init__(self, held: ByRank) -> None:
        holders: dict[Region, list[int]] = defaultdict(list)
        for rank, regions in held:
            for region in regions:
                if region.volume:
                    holders[region].append(rank)
        whole = [(region, tuple(ranks)) for region, ranks in sorted(holders.items())]
        self._atoms = whole if _disjoint([region for region, _ in whole]) else _refine(whole)
        self._starts = [region.offset[:1] for region, _ in self._atoms]
        self._longest = max((r.shape[0] for r, _ in self._atoms if r.ndim), default=0)

    def within(self, region: Region) -> list[tuple[Region, tuple[int, ...]]]:
        """The parts of `region` that somebody holds."""
        low, high = 0, len(self._atoms)
        if region.ndim:
            low = bisect_left(self._starts, (max(0, region.offset[0] - self._longest + 1),))
            high = bisect_left(self._starts, (region.end[0],))
        parts = []
        for atom, ranks in self._atoms[low:high]:
            common = atom.intersect(region)
            if common is not None:
                parts.append((common, ranks))
        return parts


def _disjoint(regions: Sequence[Region]) -> bool:
    return sum(r.volume for r in regions) == sum(r.volume for r in union(regions))


def _refine(
    held: Sequence[tuple[Region, tuple[int, ...]]],
) -> list[tuple[Region, tuple[int, ...]]]:
    """Cut overlapping regions until each part has one set of holders."""
    atoms: list[tuple[Region, tuple[int, ...]]] = []
    for region, ranks in held:
        rest = [region]
        cut: list[tuple[Region, tuple[int, ...]]] = []
        for atom, owners in atoms:
            common = atom.intersect(region)
            if common is None:
                cut.append((atom, owners))
                continue
            cut.append((common, tuple(sorted({*owners, *ranks}))))
            cut += [(part, owners) for part in subtract(atom, common)]
            rest = [part for box in rest for part in subtract(box, common)]
        atoms = cut + [(part, ranks) for part in rest]
    return sorted(atoms)
