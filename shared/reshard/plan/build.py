"""From layouts to a plan: join by name, find demands, balance the senders, assign.

Deterministic: ranks that see the same layouts, in any order, make the same plan.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from reshard.dtypes import itemsize
from reshard.errors import PlanError
from reshard.ids import FQN, GroupRank
from reshard.layout.holding import RankLayout
from reshard.layout.side import ByRank, Gathered, SideLayout, gather
from reshard.plan.assign import Quota, assign
from reshard.plan.classes import TensorClass, classify
from reshard.plan.demands import Atoms, Demand, demands
from reshard.plan.model import Bounds, TransferOp, TransferPlan
from reshard.plan.senders import Ranks, balance

Side = Sequence[RankLayout] | SideLayout | Gathered
"""What the ranks of one side report, or the same in the forms for large worlds."""


def make_plan(sources: Side, destinations: Side) -> TransferPlan:
    """Who sends which region to whom, so that every destination element is received once.

    Args:
        sources: what each source rank holds.
        destinations: what each destination rank needs. A rank in both keeps its own overlap.

    Raises:
        PlanError: lists every fault: names that the source lacks, mismatched shapes, dtypes that
            cannot be cast, elements that nobody holds or that are needed twice.
    """
    held = _side("source", sources)
    needed = _side("destination", destinations)
    joined = classify(held.sound, needed.sound, held.excused | needed.excused)
    wanted, uncovered = _all_demands(joined.classes)
    faults = (*held.faults, *needed.faults, *joined.faults, *uncovered)
    if faults:
        raise PlanError("no plan can join the source and the destination", faults)
    return _plan(joined.classes, wanted, joined.unused)


@dataclass(frozen=True, slots=True)
class _Checked:
    """One side: what is sound, what is not, and why."""

    sound: SideLayout
    excused: frozenset[FQN]
    faults: tuple[str, ...]


def _side(side: str, layouts: Side) -> _Checked:
    match layouts:
        case Gathered():
            gathered = layouts
        case SideLayout():
            gathered = Gathered(layouts, {})
        case _:
            gathered = gather(layouts)
    faults = list(gathered.faults.values())
    excused = set(gathered.faults)
    sound = []
    for group in gathered.side.groups:
        if fault := group.fault:
            faults.append(fault)
            excused.update(group.names)
        else:
            sound.append(group)
    prefixed = tuple(f"{side}: {fault}" for fault in faults)
    return _Checked(SideLayout(tuple(sound)), frozenset(excused), prefixed)


def _all_demands(
    classes: Sequence[TensorClass],
) -> tuple[list[list[Demand]], list[str]]:
    """The demands of each class, and all faults."""
    # Classes of different names, shapes or needs may be held alike: cut those once.
    atoms: dict[ByRank, Atoms] = {}
    wanted: list[list[Demand]] = []
    faults: list[str] = []
    for tensors in classes:
        if tensors.held not in atoms:
            atoms[tensors.held] = Atoms(tensors.held)
        found, uncovered = demands(tensors, atoms[tensors.held])
        wanted.append(found)
        faults += uncovered
    return wanted, faults


def _plan(
    classes: tuple[TensorClass, ...], wanted: list[list[Demand]], unused: tuple[FQN, ...]
) -> TransferPlan:
    amounts: dict[Ranks, int] = defaultdict(int)
    received: dict[GroupRank, int] = defaultdict(int)
    for tensors, demand in _each(classes, wanted):
        if not demand.stays:
            nbytes = demand.region.volume * itemsize(tensors.wire_dtype) * len(tensors.names)
            amounts[demand.holders] += nbytes * len(demand.destinations)
            for rank in demand.destinations:
                received[rank] += nbytes
    # Shares of whole elements; where dtypes of several sizes travel, of the smallest one's.
    unit = min((itemsize(tensors.wire_dtype) for tensors in classes), default=1)
    shares, least = balance(amounts, unit)
    quotas = {holders: Quota(by_rank) for holders, by_rank in shares.items()}
    ops: list[TransferOp] = []
    for index, (tensors, of_class) in enumerate(zip(classes, wanted, strict=True)):
        for demand in of_class:
            if demand.stays:
                ops.append(_kept(index, tensors, demand))
            else:
                ops += assign(index, tensors, demand, quotas[demand.holders])
    bounds = Bounds(max(received.values(), default=0), ceil(least))
    return TransferPlan(classes, tuple(ops), bounds, unused)


def _each(
    classes: Sequence[TensorClass], wanted: Sequence[Sequence[Demand]]
) -> list[tuple[TensorClass, Demand]]:
    return [
        (tensors, demand)
        for tensors, of_class in zip(classes, wanted, strict=True)
        for demand in of_class
    ]


def _kept(index: int, tensors: TensorClass, demand: Demand) -> TransferOp:
    (rank,) = demand.destinations
    return TransferOp(rank, (rank,), index, 0, len(tensors.names), demand.region)
