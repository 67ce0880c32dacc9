"""Who sends: the split of demands over their holders that keeps the busiest sender least busy.

Demands with the same set of holders are one amount of bytes. Splitting amounts over holders so that
the largest load is least is a bottleneck transportation problem: its optimum is the largest density
`bytes that only S can send / |S|` over sets S of ranks, found by a few maximum flows (Dinkelbach's
iteration: each minimum cut names a denser set).
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from reshard.ids import GroupRank

Ranks = tuple[GroupRank, ...]
"""Group ranks, sorted."""

_Step = tuple[GroupRank, Ranks | None]
"""From an amount to one of its holders, and to another amount that makes room there."""


def balance(
    amounts: Mapping[Ranks, int], unit: int = 1
) -> tuple[dict[Ranks, dict[GroupRank, int]], Fraction]:
    """Split each amount over its holders.

    Args:
        amounts: bytes to send by set of holders (sorted, not empty); multiples of `unit`.
        unit: bytes that cannot be split.

    Returns:
        bytes by set and holder, multiples of `unit` that sum to the amounts; and the least largest
        load, in bytes, that is possible if everything can be split. No sender exceeds it by a unit.

    >>> shares, bound = balance({(0, 1): 100, (0,): 20})
    >>> bound, shares[0, 1]
    (Fraction(60, 1), {0: 40, 1: 60})
    """
    units = {holders: n // unit for holders, n in sorted(amounts.items()) if n}
    if not units:
        return {}, Fraction(0)
    bound = _least_largest_load(units)
    network = _Network(units, ceil(bound))
    network.fill()
    return network.shares(unit), bound * unit


def _least_largest_load(amounts: Mapping[Ranks, int]) -> Fraction:
    """Start from the average load; each failed flow names a set of ranks that must do more."""
    bound = Fraction(sum(amounts.values()), len({r for holders in amounts for r in holders}))
    while True:
        # Both sides times the denominator: flows of integers find the fraction exactly.
        scaled = {holders: n * bound.denominator for holders, n in amounts.items()}
        network = _Network(scaled, bound.numerator)
        if network.fill():
            return bound
        holders, ranks = network.cut()
        bound = Fraction(sum(amounts[h] for h in holders), len(ranks))


class _Network:
    """Flow from amounts to holders of equal capacity, by Dinic's algorithm.

    A path alternates: an amount goes to a holder; one without room passes on what some other amount
    sends through it, which that amount then sends through another of its holders.
    """

    def __init__(self, amounts: Mapping[Ranks, int], capacity: int) -> None:
        self._amounts = amounts
        self._left = dict(amounts)
        self._flow: dict[Ranks, dict[GroupRank, int]] = {h: dict.fromkeys(h, 0) for h in amounts}
        self._users: dict[GroupRank, list[Ranks]] = defaultdict(list)
        for holders in amounts:
            for rank in holders:
                self._users[rank].append(holders)
        self._room = dict.fromkeys(self._users, capacity)

    def fill(self) -> bool:
        """Route everything if it can be; a first even split leaves little to reroute."""
        for holders in self._amounts:
            for seen, rank in enumerate(holders):
                fair = -(-self._left[holders] // (len(holders) - seen))
                self._push(holders, rank, min(fair, self._room[rank]))
        while any(self._left.values()):
            levels = self._levels()
            if not any(self._room[rank] for rank in levels.of_rank):
                return False
            for holders in self._amounts:
                self._route(holders, levels)
        return True

    def shares(self, unit: int) -> dict[Ranks, dict[GroupRank, int]]:
        """What each holder sends of each amount."""
        return {h: {r: n * unit for r, n in flow.items() if n} for h, flow in self._flow.items()}

    def cut(self) -> tuple[list[Ranks], list[GroupRank]]:
        """The amounts that could not all be routed, and the ranks that alone hold them."""
        levels = self._levels()
        return list(levels.of_amount), list(levels.of_rank)

    def _push(self, holders: Ranks, rank: GroupRank, amount: int) -> None:
        self._flow[holders][rank] += amount
        self._left[holders] -= amount
        self._room[rank] -= amount

    def _levels(self) -> "_Levels":
        """Breadth first from the amounts that are not all routed."""
        levels = _Levels({h: 0 for h, left in self._left.items() if left}, {})
        queue = deque(levels.of_amount)
        while queue:
            holders = queue.popleft()
            level = levels.of_amount[holders]
            for rank in holders:
                if rank in levels.of_rank:
                    continue
                levels.of_rank[rank] = level
                for other in self._users[rank]:
                    if other not in levels.of_amount and self._flow[other][rank]:
                        levels.of_amount[other] = level + 1
                        queue.append(other)
        levels.steps = {holders: self._steps(holders, levels) for holders in levels.of_amount}
        return levels

    def _steps(self, holders: Ranks, levels: "_Levels") -> list[_Step]:
        """Ways on from an amount, last first: a holder's room, or what another sends through it."""
        level = levels.of_amount[holders]
        return [
            (rank, other)
            for rank in reversed(holders)
            if levels.of_rank[rank] == level
            for other in (*self._users[rank], None)
            if other is None or levels.of_amount.get(other) == level + 1
        ]

    def _route(self, start: Ranks, levels: "_Levels") -> None:
        """Send what is left of an amount along paths of rising level, until none is open."""
        path: list[tuple[Ranks, GroupRank, Ranks]] = []
        at = start
        while self._left[start]:
            steps = levels.steps[at]
            if not steps:
                if not path:
                    return
                at, _, _ = path.pop()
                levels.steps[at].pop()
                continue
            rank, other = steps[-1]
            if other is None and self._room[rank]:
                self._augment(start, path, at, rank)
                path.clear()
                at = start
            elif other is not None and self._flow[other][rank]:
                path.append((at, rank, other))
                at = other
            else:
                steps.pop()

    def _augment(
        self,
        start: Ranks,
        path: Sequence[tuple[Ranks, GroupRank, Ranks]],
        last: Ranks,
        end: GroupRank,
    ) -> None:
        """Move what a path carries: each amount takes the place of the next one at a holder."""
        carried = min(self._left[start], self._room[end])
        for _, rank, other in path:
            carried = min(carried, self._flow[other][rank])
        for holders, rank, other in path:
            self._flow[holders][rank] += carried
            self._flow[other][rank] -= carried
        self._flow[last][end] += carried
        self._room[end] -= carried
        self._left[start] -= carried


@dataclass(slots=True)
class _Levels:
    """Distances of one round, and which steps are still open.

    Attributes:
        of_amount, of_rank: number of reroutings from an amount that is not all routed.
        steps: from each amount; the last is tried next.
    """

    of_amount: dict[Ranks, int]
    of_rank: dict[GroupRank, int]
    steps: dict[Ranks, list[_Step]] = field(default_factory=dict)
