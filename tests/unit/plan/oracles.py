"""What a plan must do, element by element, and the least load that is possible, by an LP."""

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np
from scipy.optimize import linprog
from tests.unit.layout.strategies import elements, enumerate_shard
from tests.unit.plan.worlds import Case

from reshard.dtypes import itemsize
from reshard.ids import FQN
from reshard.plan import TransferOp, TransferPlan

Amounts = Mapping[tuple[int, ...], float]
"""Bytes to send by set of holders."""


def names_of(plan: TransferPlan, op: TransferOp) -> tuple[FQN, ...]:
    return plan.classes[op.tensors].names[op.first : op.last]


def received(plan: TransferPlan) -> dict[tuple[str, int], Counter[int]]:
    """How often each destination rank gets each element of each tensor."""
    got: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    for op in plan.ops:
        shape = plan.classes[op.tensors].shape
        for name in names_of(plan, op):
            for destination in op.destinations:
                got[name, destination].update(elements(shape, op.region.offset, op.region.shape))
    return got


def assert_covers(plan: TransferPlan, case: Case) -> None:
    """COVER: every destination element once, from a rank that holds it, own ones kept."""
    got = received(plan)
    for name, (source, destination) in case.items():
        held = {r: set(enumerate_shard(source, r).reshape(-1).tolist()) for r in source.mesh.ranks}
        for rank in destination.mesh.ranks:
            wanted = enumerate_shard(destination, rank).reshape(-1).tolist()
            assert got[name, rank] == Counter(wanted), f"{name} on rank {rank}"
        for op in plan.ops:
            if name not in names_of(plan, op):
                continue
            moved = set(elements(source.shape, op.region.offset, op.region.shape))
            assert moved <= held[op.source], f"rank {op.source} does not hold all it sends"
            if not op.stays:
                assert not any(moved & held.get(rank, set()) for rank in op.destinations)


def amounts_of(plan: TransferPlan, case: Case) -> Amounts:
    """Bytes that have to travel, by the set of ranks that hold them, element by element."""
    amounts: Counter[tuple[int, ...]] = Counter()
    dtypes = {name: tensors.wire_dtype for tensors in plan.classes for name in tensors.names}
    for name, (source, destination) in case.items():
        holders: dict[int, list[int]] = defaultdict(list)
        for rank in sorted(source.mesh.ranks):
            for number in enumerate_shard(source, rank).reshape(-1).tolist():
                holders[number].append(rank)
        for rank in destination.mesh.ranks:
            for number in enumerate_shard(destination, rank).reshape(-1).tolist():
                if rank not in holders[number]:
                    amounts[tuple(holders[number])] += itemsize(dtypes[FQN(name)])
    return amounts


def least_largest_load(amounts: Amounts) -> float:
    """The LP: split each amount over its holders so that the largest load is least."""
    if not amounts:
        return 0.0
    shares = [(holders, rank) for holders in amounts for rank in holders]
    ranks = sorted({rank for _, rank in shares})
    # Unknowns: one share a pair of amount and holder, and the largest load.
    cost = np.append(np.zeros(len(shares)), 1.0)
    whole = np.array([[*(float(h == of) for h, _ in shares), 0.0] for of in amounts])
    load = np.array([[*(float(r == rank) for _, r in shares), -1.0] for rank in ranks])
    solved = linprog(
        cost, A_ub=load, b_ub=np.zeros(len(ranks)), A_eq=whole, b_eq=list(amounts.values())
    )
    assert solved.success, solved.message
    return float(solved.fun)


def first_holder(amounts: Amounts) -> float:
    """Largest load if the lowest rank that holds something always sends it."""
    loads: Counter[int] = Counter()
    for holders, amount in amounts.items():
        loads[holders[0]] += int(amount)
    return max(loads.values(), default=0)


def round_robin(amounts: Amounts, element: int) -> float:
    """Largest load if the holders of something take turns, one element each."""
    loads: dict[int, float] = defaultdict(float)
    for holders, amount in amounts.items():
        for turn in range(int(amount) // element):
            loads[holders[turn % len(holders)]] += element
    return max(loads.values(), default=0.0)
