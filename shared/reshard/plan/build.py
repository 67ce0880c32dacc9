"""From layouts to a plan: classify, find demands, balance the senders, order.

Deterministic: ranks that see the same layouts, in any order, make the same plan.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from reshard.dtypes import itemsize
from reshard.errors import PlanError
from reshard.layout.boxes import flat_boxes
from reshard.layout.holding import RankLayout
from reshard.layout.region import Region
from reshard.plan.classes import TensorClass, classify
from reshard.plan.demands import Demand, demands
from reshard.plan.model import Bounds, TransferOp, TransferPlan
from reshard.plan.senders import Holders, balance


def make_plan(sources: Sequence[RankLayout], destinations: Sequence[RankLayout]) -> TransferPlan:
    """Who sends which region to whom, so that every destination element is received once.

    Args:
        sources: what each source rank holds.
        destinations: what each destination rank needs. A rank in both keeps its own overlap.

    Raises:
        PlanError: all mismatches of a kind together: names, shapes, dtypes; then coverage.
    """
    classes, unused = classify(sources, destinations)
    wanted = _demands(classes)
    amounts: dict[Holders, int] = defaultdict(int)
    for tensors, demand in wanted:
        if demand.holders != (demand.destination,):
            amounts[demand.holders] += _nbytes(classes[tensors], demand)
    shares, bound = balance(amounts)
    quotas = {holders: _Quota(dict(sorted(by_rank.items()))) for holders, by_rank in shares.items()}
    ops: list[TransferOp] = []
    for tensors, demand in wanted:
        if demand.holders == (demand.destination,):
            count = len(classes[tensors].names)
            ops.append(_op(demand.destination, demand, tensors, 0, count, demand.region))
        else:
            ops += _assign(classes[tensors], tensors, demand, quotas[demand.holders])
    received: dict[int, int] = defaultdict(int)
    for tensors, demand in wanted:
        if demand.holders != (demand.destination,):
            received[demand.destination] += _nbytes(classes[tensors], demand)
    least = -(-bound.numerator // bound.denominator)
    return TransferPlan(
        classes, tuple(ops), Bounds(max(received.values(), default=0), least), unused
    )


def _demands(classes: Sequence[TensorClass]) -> list[tuple[int, Demand]]:
    wanted: list[tuple[int, Demand]] = []
    faults: list[str] = []
    for index, tensors in enumerate(classes):
        try:
            wanted += [(index, demand) for demand in demands(tensors)]
        except PlanError as error:
            faults += error.faults
    if faults:
        raise PlanError("destination elements are not covered exactly once", faults)
    return wanted


def _nbytes(tensors: TensorClass, demand: Demand) -> int:
    return demand.region.volume * itemsize(tensors.wire_dtype) * len(tensors.names)


@dataclass(slots=True)
class _Quota:
    """How many bytes each holder of a set still has to send; filled in rank order."""

    left: dict[int, int]
    order: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.order = list(self.left)

    def take(self, wanted: int, unit: int) -> tuple[int, int]:
        """The next sender, and how many whole units of at most `wanted` bytes it sends."""
        while len(self.order) > 1 and self.left[self.order[0]] < unit:
            # Less than a unit is left: the next holder sends it, so that no load grows by more.
            done = self.order.pop(0)
            self.left[self.order[0]] += self.left[done]
        rank = self.order[0]
        # The last holder takes what rounding to whole units has left.
        units = wanted // unit if len(self.order) == 1 else min(wanted, self.left[rank]) // unit
        self.left[rank] -= units * unit
        return rank, units


def _assign(
    tensors: TensorClass, index: int, demand: Demand, quota: _Quota
) -> Iterator[TransferOp]:
    """Fill the holders' quotas: whole tensors first, one tensor split where a quota ends."""
    element = itemsize(tensors.wire_dtype)
    each = demand.region.volume * element
    first, count = 0, len(tensors.names)
    while first < count:
        rank, whole = quota.take((count - first) * each, each) if _fits(quota, each) else (-1, 0)
        if whole:
            yield _op(rank, demand, index, first, first + whole, demand.region)
            first += whole
            continue
        start = 0
        while start < demand.region.volume:
            rank, units = quota.take((demand.region.volume - start) * element, element)
            for box in _part(demand.region, start, units):
                yield _op(rank, demand, index, first, first + 1, box)
            start += units
        first += 1


def _fits(quota: _Quota, nbytes: int) -> bool:
    """Whether the next sender has room for a whole tensor."""
    return len(quota.order) == 1 or quota.left[quota.order[0]] >= nbytes


def _part(region: Region, start: int, length: int) -> list[Region]:
    """Elements `[start, start + length)` of a region, row-major, as boxes."""
    return [box.translate(region.offset) for box in flat_boxes(region.shape, start, length)]


def _op(
    source: int, demand: Demand, tensors: int, first: int, last: int, region: Region
) -> TransferOp:
    return TransferOp(source, demand.destination, tensors, first, last, region)
