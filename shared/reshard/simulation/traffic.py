"""Bytes by resource: what each rank's and each node's links carry in one phase of a refit.

Not here: how fast they are (`machine`), why the bytes move (`methods`).
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from reshard.simulation.machine import Machine, Wire

Way = Literal["out of", "into"]

Resource = tuple[Wire, Way, int]
"""Which wire, which way, of which rank (of a node link: of which node)."""

_NAMES: Final[dict[Wire, str]] = {
    "link": "link of rank",
    "node link": "links of node",
    "neighbours": "local link of rank",
}


@dataclass(slots=True)
class Traffic:
    """Bytes by resource.

    Attributes:
        machine: whose resources.
        loads: bytes by resource.
        messages: by rank.
        copied: bytes that each rank copies.
    """

    machine: Machine
    loads: dict[Resource, float] = field(default_factory=lambda: defaultdict(float))
    messages: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    copied: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def send(self, source: int, destination: int, nbytes: float) -> None:
        """Bytes from one rank to another; none where it keeps its own."""
        if source == destination or not nbytes:
            return
        machine = self.machine
        near = machine.node(source) == machine.node(destination)
        self._load("neighbours" if near else "link", source, destination, nbytes)
        if not near:
            self._load("node link", machine.node(source), machine.node(destination), nbytes)
        count = machine.messages(nbytes)
        self.messages[source] += count
        self.messages[destination] += count

    def share(self, ranks: Sequence[int], nbytes: float) -> None:
        """An all-gather: `nbytes` lie spread evenly over `ranks`, and each gets all of them.

        Each node takes what its ranks lack once, through all of its ranks' links, and passes it on
        inside: what a ring does.
        """
        machine = self.machine
        size = len(ranks)
        members = Counter(map(machine.node, ranks))
        for node, count in members.items():
            crossing = nbytes * (1 - count / size) if len(members) > 1 else 0.0
            self._load("node link", node, node, crossing)
        for rank in ranks:
            count = members[machine.node(rank)]
            crossing = nbytes * (1 - count / size) if len(members) > 1 else 0.0
            self._load("link", rank, rank, crossing / count)
            if count > 1:
                inside = nbytes * (1 - 1 / size) - crossing / count
                self._load("neighbours", rank, rank, inside)
            self.messages[rank] += machine.messages(nbytes)

    def broadcast(self, root: int, ranks: Sequence[int], nbytes: float) -> None:
        """From one rank to all of some others: each node takes the bytes once.

        The root gives them once, through its own link; nodes pass them along a chain.
        """
        machine = self.machine
        home = machine.node(root)
        members = Counter(map(machine.node, ranks))
        away = [node for node in sorted(members) if node != home]
        if away:
            self._give("link", root, nbytes)
            self._give("node link", home, nbytes)
        for node in away:
            self._take("node link", node, nbytes)
        for node in away[:-1]:
            self._give("node link", node, nbytes)
        self._give("neighbours", root, nbytes if home in members else 0.0)
        for rank in ranks:
            node = machine.node(rank)
            count = members[node]
            if node != home:
                self._take("link", rank, nbytes / count)
                if node != away[-1]:
                    self._give("link", rank, nbytes / count)
            inside = nbytes if node == home else nbytes * (1 - 1 / count)
            self._load("neighbours", rank, rank, inside)
            self.messages[rank] += machine.messages(nbytes)
        self.messages[root] += machine.messages(nbytes)

    def copy(self, rank: int, nbytes: float) -> None:
        """Bytes that a rank packs, unpacks or loads."""
        self.copied[rank] += nbytes

    @property
    def busiest(self) -> tuple[float, str]:
        """Seconds of the busiest resource, and which it is."""
        return max(
            (
                (nbytes * 8e-9 / self.machine.gbps(wire), f"{way} the {_NAMES[wire]} {at}")
                for (wire, way, at), nbytes in self.loads.items()
            ),
            key=lambda each: each[0],
            default=(0.0, "nothing"),
        )

    @property
    def latency(self) -> float:
        """Seconds of latency of the rank that has most messages."""
        return max(self.messages.values(), default=0) * self.machine.latency_us * 1e-6

    @property
    def copies(self) -> float:
        """Seconds of the rank that copies most."""
        return self.machine.copy_seconds(max(self.copied.values(), default=0.0))

    def total(self, way: Way) -> float:
        """Bytes that all ranks together send or receive, inside nodes and between them."""
        return sum(
            nbytes
            for (wire, of, _), nbytes in self.loads.items()
            if of == way and wire != "node link"
        )

    def _load(self, wire: Wire, source: int, destination: int, nbytes: float) -> None:
        self._give(wire, source, nbytes)
        self._take(wire, destination, nbytes)

    def _give(self, wire: Wire, at: int, nbytes: float) -> None:
        if nbytes:
            self.loads[wire, "out of", at] += nbytes

    def _take(self, wire: Wire, at: int, nbytes: float) -> None:
        if nbytes:
            self.loads[wire, "into", at] += nbytes
