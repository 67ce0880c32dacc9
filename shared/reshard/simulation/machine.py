"""The cost model: what a refit's bytes take on stated hardware.

Rates only, no schedule: a phase lasts as long as its busiest resource (a rank's link, a node's
link, a rank's link to its neighbours in the node), plus a latency for each message of the rank that
has most, plus the copies of the rank that has most, plus the host's time for tensors that go
through a loader one by one. Phases follow each other. Nothing is fitted to any measurement of a
refit, so a prediction is what the hardware allows, and what a published figure exceeds it by is
software. Not here: who carries what (`traffic`).
"""

from dataclasses import dataclass
from typing import Literal

from reshard.errors import LayoutError

Wire = Literal["link", "node link", "neighbours"]
"""A rank to other nodes; all of a node's ranks to other nodes; a rank to others of its node."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware. Rates are in gigabits a second, each way.

    The defaults are the data sheet of an H100 node with eight GPUs and as many 400 Gb/s adapters.

    Attributes:
        nodes: how many.
        gpus_per_node: ranks of each.
        link_gbps: of one rank to other nodes.
        node_link_gbps: of all ranks of a node together; 0: as much as their links have.
        local_gbps: of one rank to others of its node (NVLink).
        copy_gbps: bytes that one rank copies (each read once and written once).
        latency_us: of one message.
        loader_us: host time of one tensor that an engine rank takes through its loader.
        bucket_mib: largest message.
    """

    nodes: int
    gpus_per_node: int = 8
    link_gbps: float = 400.0
    node_link_gbps: float = 0.0
    local_gbps: float = 3600.0
    copy_gbps: float = 13400.0
    latency_us: float = 20.0
    loader_us: float = 30.0
    bucket_mib: float = 256.0

    def __post_init__(self) -> None:
        faults = [
            f"{name} = {value}: expected more than 0"
            for name in ("nodes", "gpus_per_node", "link_gbps", "local_gbps", "copy_gbps")
            if not (value := getattr(self, name)) > 0
        ]
        faults += [
            f"{name} = {value}: expected 0 or more"
            for name in ("node_link_gbps", "latency_us", "loader_us")
            if not (value := getattr(self, name)) >= 0
        ]
        if not self.bucket_mib * 2**20 >= 1:
            faults.append(f"bucket_mib = {self.bucket_mib}: not even a byte")
        if faults:
            raise LayoutError("no such machine", faults)

    def node(self, rank: int) -> int:
        """The node of a rank: ranks fill nodes in order."""
        return rank // self.gpus_per_node

    def messages(self, nbytes: float) -> int:
        """Messages that carry some bytes of one pair of ranks."""
        return int(-(-nbytes // (self.bucket_mib * 2**20)))

    def gbps(self, wire: Wire) -> float:
        """The rate of a wire, each way."""
        match wire:
            case "link":
                return self.link_gbps
            case "node link":
                return self.node_link_gbps or self.link_gbps * self.gpus_per_node
            case "neighbours":
                return self.local_gbps

    def copy_seconds(self, nbytes: float) -> float:
        """What a rank takes to copy some bytes."""
        return nbytes * 8e-9 / self.copy_gbps
