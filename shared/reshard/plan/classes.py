"""Tensors that lie alike on both sides: the unit of planning.

The layers of a model repeat, so most tensors have the shape, the dtypes and the regions by rank of
many others. They form one class, which is checked and planned once. Not here: who sends.
"""

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass

from reshard.dtypes import DType, castable
from reshard.ids import FQN
from reshard.layout.side import ByRank, SideLayout, TensorGroup


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
class Joined:
    """Both sides, joined by name.

    Attributes:
        classes: what fits; sorted by first name.
        unused: source names that no destination needs.
        faults: every name that does not fit.
    """

    classes: tuple[TensorClass, ...]
    unused: tuple[FQN, ...]
    faults: tuple[str, ...]


def classify(
    sources: SideLayout, destinations: SideLayout, excused: Container[FQN] = frozenset()
) -> Joined:
    """Join both sides by name and group what lies alike.

    Args:
        sources: what the source ranks hold.
        destinations: what the destination ranks need.
        excused: names whose faults are already known, on either side.
    """
    faults: list[str] = []
    source_of, twice = _by_name(sources)
    faults += twice.values()
    classes: list[TensorClass] = []
    wanted: set[FQN] = set()
    for group in destinations.groups:
        wanted.update(group.names)
        together: dict[int, list[FQN]] = defaultdict(list)
        for name in group.names:
            if name in source_of:
                together[source_of[name]].append(name)
            elif name not in twice and name not in excused:
                faults.append(f"{name}: needed by the destination, held by no source rank")
        for number, names in together.items():
            source = sources.groups[number]
            mismatch = _mismatch(source, group)
            faults += [f"{name}: {mismatch}" for name in names if mismatch]
            if not mismatch:
                classes.append(_class(names, source, group))
    classes.sort(key=lambda tensors: (tensors.names, tensors.wire_dtype))
    unused = tuple(sorted(name for name in source_of if name not in wanted))
    return Joined(tuple(classes), unused, tuple(faults))


def _by_name(sources: SideLayout) -> tuple[dict[FQN, int], dict[FQN, str]]:
    """The group of each source tensor; and a fault for each that several groups hold."""
    found: dict[FQN, int] = {}
    twice: dict[FQN, str] = {}
    for number, group in enumerate(sources.groups):
        for name in group.names:
            first = found.setdefault(name, number)
            if first != number:
                twice[name] = f"{name}: {_differ(sources.groups[first], group)}"
    return {name: number for name, number in found.items() if name not in twice}, twice


def _differ(one: TensorGroup, other: TensorGroup) -> str:
    if one.dtype != other.dtype:
        return f"source ranks disagree on the dtype: {', '.join(sorted((one.dtype, other.dtype)))}"
    return "the source describes it twice"


def _mismatch(source: TensorGroup, destination: TensorGroup) -> str:
    if source.shape != destination.shape:
        return f"shape {source.shape} at the source, {destination.shape} at the destination"
    if not castable(source.dtype, destination.dtype):
        return f"{source.dtype} at the source cannot be cast to {destination.dtype}"
    return ""


def _class(names: list[FQN], source: TensorGroup, destination: TensorGroup) -> TensorClass:
    return TensorClass(
        tuple(names),
        source.shape,
        source.dtype,
        destination.dtype,
        source.by_rank,
        destination.by_rank,
    )
