"""Tensors that lie alike: the unit of planning.

The layers of a model repeat, so most tensors have the shape, the dtypes and the regions by rank of
many others. They form one class, which is checked and planned once. Not here: who sends.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard.dtypes import DType, castable
from reshard.errors import PlanError
from reshard.ids import FQN
from reshard.layout.holding import RankLayout, TensorLayout
from reshard.layout.region import Region

ByRank = tuple[tuple[int, tuple[Region, ...]], ...]
"""Regions by group rank, sorted by rank; ranks without any are left out."""


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors of equal shape, dtypes and layouts.

    Attributes:
        names: canonical names, sorted.
        shape: of each whole tensor, in elements.
        source_dtype: the dtype that the holders have.
        wire_dtype: the dtype that travels and that the destinations want.
        held: what each source rank holds.
        needed: what each destination rank needs; disjoint within a rank.
    """

    names: tuple[FQN, ...]
    shape: tuple[int, ...]
    source_dtype: DType
    wire_dtype: DType
    held: ByRank
    needed: ByRank


@dataclass(frozen=True, slots=True)
class _Side:
    """One tensor on one side."""

    shape: tuple[int, ...]
    dtype: DType
    by_rank: ByRank


def classify(
    sources: Sequence[RankLayout], destinations: Sequence[RankLayout]
) -> tuple[tuple[TensorClass, ...], tuple[FQN, ...]]:
    """Join both sides by name and group what lies alike.

    Returns:
        the classes, sorted by first name; and the source names that no destination needs.

    Raises:
        PlanError: every missing name, differing shape, disagreement within a side, and uncastable
            dtype.
    """
    faults: list[str] = []
    held = _side(sources, "source", faults)
    needed = _side(destinations, "destination", faults)
    source_of = {name: (name, dtype) for name, dtype in held}
    if len(source_of) != len(held):
        faults += _two_dtypes(held)
    names: dict[tuple[_Side, _Side], list[FQN]] = defaultdict(list)
    for name, dtype in sorted(needed):
        if name not in source_of:
            faults.append(f"{name}: needed by the destination, held by no source rank")
            continue
        source, destination = held[source_of[name]], needed[name, dtype]
        fault = _mismatch(name, source, destination)
        if fault:
            faults.append(fault)
        else:
            names[source, destination].append(name)
    if faults:
        raise PlanError("source and destination cannot be joined", faults)
    classes = (
        TensorClass(tuple(members), s.shape, s.dtype, d.dtype, s.by_rank, d.by_rank)
        for (s, d), members in names.items()
    )
    unused = sorted({name for name, _ in held} - {name for name, _ in needed})
    return tuple(sorted(classes, key=lambda c: (c.names, c.wire_dtype))), tuple(unused)


def _side(
    layouts: Sequence[RankLayout], side: str, faults: list[str]
) -> dict[tuple[FQN, DType], _Side]:
    """All ranks' parts of one side, by name and dtype."""
    parts: dict[tuple[FQN, DType], list[tuple[int, TensorLayout]]] = defaultdict(list)
    for layout in sorted(layouts, key=lambda layout: layout.rank):
        for tensor in layout.tensors:
            parts[tensor.name, tensor.dtype].append((layout.rank, tensor))
    joined: dict[tuple[FQN, DType], _Side] = {}
    for key, held in sorted(parts.items()):
        shapes = {tensor.shape for _, tensor in held}
        if len(shapes) > 1:
            by_rank = ", ".join(f"{tensor.shape} on rank {rank}" for rank, tensor in held)
            faults.append(f"{key[0]}: {side} ranks disagree on the shape: {by_rank}")
        regions = tuple(
            (rank, tensor.regions) for rank, tensor in held if any(r.volume for r in tensor.regions)
        )
        joined[key] = _Side(held[0][1].shape, key[1], regions)
    return joined


def _two_dtypes(held: Mapping[tuple[FQN, DType], _Side]) -> list[str]:
    dtypes: dict[FQN, list[DType]] = defaultdict(list)
    for name, dtype in held:
        dtypes[name].append(dtype)
    return [
        f"{name}: source ranks disagree on the dtype: {', '.join(sorted(several))}"
        for name, several in sorted(dtypes.items())
        if len(several) > 1
    ]


def _mismatch(name: FQN, source: _Side, destination: _Side) -> str:
    if source.shape != destination.shape:
        return f"{name}: shape {source.shape} at the source, {destination.shape} at the destination"
    if not castable(source.dtype, destination.dtype):
        return f"{name}: {source.dtype} at the source cannot be cast to {destination.dtype}"
    return ""
