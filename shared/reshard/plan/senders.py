"""Who sends: the split of demands over their holders that keeps the busiest sender least busy.

Demands with the same set of holders are one amount of bytes. Splitting amounts over holders so that
the largest load is least is a bottleneck transportation problem: its optimum is the largest density
`bytes that only S can send / |S|` over sets S of ranks, found by a few maximum flows (Dinkelbach's
iteration: each minimum cut names a denser set).
"""

from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise

Holders = tuple[int, ...]


def balance(
    amounts: Mapping[Holders, int],
) -> tuple[dict[Holders, dict[int, int]], Fraction]:
    """Split each amount over its holders.

    Args:
        amounts: bytes to send by set of holders (sorted, not empty).

    Returns:
        bytes by set and holder, summing to the amounts; and the least possible largest load, in
        bytes, which no sender exceeds by more than one byte.

    >>> shares, bound = balance({(0, 1): 100, (0,): 20})
    >>> bound, shares[0, 1]
    (Fraction(60, 1), {0: 40, 1: 60})
    """
    amounts = {holders: n for holders, n in sorted(amounts.items()) if n}
    if not amounts:
        return {}, Fraction(0)
    bound = Fraction(sum(amounts.values()), len({r for holders in amounts for r in holders}))
    while True:
        capacity = -(-bound.numerator // bound.denominator)
        network = _Network(amounts, capacity)
        if network.fill():
            return network.shares(), bound
        bound = network.density_of_cut()


class _Network:
    """Flow from amounts to holders, each holder of equal capacity (Dinic's algorithm)."""

    def __init__(self, amounts: Mapping[Holders, int], capacity: int) -> None:
        self._amounts = dict(amounts)
        self._flow: dict[Holders, dict[int, int]] = {h: dict.fromkeys(h, 0) for h in amounts}
        self._left = dict(amounts)
        self._room = {r: capacity for holders in amounts for r in holders}
        self._users: dict[int, list[Holders]] = {r: [] for r in self._room}
        for holders in amounts:
            for rank in holders:
                self._users[rank].append(holders)

    def fill(self) -> bool:
        """Route everything if it can be; a first even split leaves little to reroute."""
        for holders in self._amounts:
            for seen, rank in enumerate(holders):
                fair = -(-self._left[holders] // (len(holders) - seen))
                self._push(holders, rank, min(fair, self._room[rank]))
        while path := self._path():
            self._augment(path)
        return not any(self._left.values())

    def shares(self) -> dict[Holders, dict[int, int]]:
        return {h: {r: n for r, n in flow.items() if n} for h, flow in self._flow.items()}

    def density_of_cut(self) -> Fraction:
        """Bytes that only the ranks of the minimum cut can send, over their number."""
        holders, ranks = self._reached()
        return Fraction(sum(self._amounts[h] for h in holders), len(ranks))

    def _push(self, holders: Holders, rank: int, amount: int) -> None:
        self._flow[holders][rank] += amount
        self._left[holders] -= amount
        self._room[rank] -= amount

    def _search(self) -> tuple[dict[Holders, int | None], dict[int, Holders], int | None]:
        """Breadth first from amounts with something left, over holders, back over used shares."""
        from_rank: dict[Holders, int | None] = {h: None for h, n in self._left.items() if n}
        from_holders: dict[int, Holders] = {}
        queue = deque(from_rank)
        while queue:
            holders = queue.popleft()
            for rank in holders:
                if rank in from_holders:
                    continue
                from_holders[rank] = holders
                if self._room[rank]:
                    return from_rank, from_holders, rank
                for other in self._users[rank]:
                    if other not in from_rank and self._flow[other][rank]:
                        from_rank[other] = rank
                        queue.append(other)
        return from_rank, from_holders, None

    def _path(self) -> list[tuple[Holders, int]]:
        """Alternating (amount, holder) steps that end at a holder with room; empty if none."""
        from_rank, from_holders, end = self._search()
        path: list[tuple[Holders, int]] = []
        while end is not None:
            holders = from_holders[end]
            path.append((holders, end))
            end = from_rank[holders]
        return list(reversed(path))

    def _augment(self, path: list[tuple[Holders, int]]) -> None:
        """Move what the path carries: each amount leaves the holder before it for its own."""
        carried = min(self._left[path[0][0]], self._room[path[-1][1]])
        for (_, rank), (holders, _) in pairwise(path):
            carried = min(carried, self._flow[holders][rank])
        self._left[path[0][0]] -= carried
        self._room[path[-1][1]] -= carried
        for holders, rank in path:
            self._flow[holders][rank] += carried
        for (_, rank), (holders, _) in pairwise(path):
            self._flow[holders][rank] -= carried

    def _reached(self) -> tuple[list[Holders], list[int]]:
        from_rank, from_holders, _ = self._search()
        return list(from_rank), list(from_holders)
