"""Transfer plans: who sends which region to whom, as data.

A plan is made from the layouts alone, printed, hashed, compared and tested without a device. It
holds canonical regions only: strides and storages never leave their rank.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from reshard.dtypes import itemsize
from reshard.ids import FQN, GroupRank
from reshard.layout.region import Region
from reshard.plan.classes import TensorClass
from reshard.plan.moves import Moves, RankPlan, Run

_FORMAT: Final = "reshard plan 1"
"""Hashed first: plans of different formats never agree."""

_PART: Final = 512
"""Values that are encoded at one time for the digest."""


@dataclass(frozen=True, slots=True)
class TransferOp:
    """The same region of some tensors of a class, from one rank to some others.

    Attributes:
        source: group rank of the sender.
        destinations: group ranks of the receivers; `(source,)` where a rank keeps its own.
        tensors: position of the class in `TransferPlan.classes`.
        first, last: names `first <= i < last` of the class.
        region: global region of each of these tensors.
    """

    source: GroupRank
    destinations: tuple[GroupRank, ...]
    tensors: int
    first: int
    last: int
    region: Region

    @property
    def stays(self) -> bool:
        """Whether it is a rank's own overlap, which does not travel."""
        return self.destinations == (self.source,)


@dataclass(frozen=True, slots=True)
class Transfer:
    """All regions of one tensor that go from one rank to another.

    Attributes:
        name: canonical name.
        source: group rank of the sender.
        destination: group rank of the receiver; equal to `source` where a rank keeps its own.
        regions: global, sorted.
    """

    name: FQN
    source: GroupRank
    destination: GroupRank
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least that any plan for these layouts can reach.

    Attributes:
        max_received_bytes: the most that some destination needs from others.
        max_sent_bytes: the least possible load of the busiest sender.
    """

    max_received_bytes: int
    max_sent_bytes: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Who sends which region to whom; every destination element exactly once.

    Attributes:
        classes: the tensors, grouped by layout.
        ops: the transfers, in the order in which they are made.
        bounds: what no plan can undercut.
        unused_sources: names that the source holds and no destination needs.
        digest: SHA-256 of the plan; equal on all ranks that agree.
        sent_bytes: wire bytes by sender, own overlap not counted.
        received_bytes: wire bytes by receiver, own overlap not counted.
        kept_bytes: bytes that ranks on both sides keep, all together.
    """

    classes: tuple[TensorClass, ...]
    ops: tuple[TransferOp, ...]
    bounds: Bounds
    unused_sources: tuple[FQN, ...]
    digest: str = field(init=False)
    sent_bytes: Mapping[GroupRank, int] = field(init=False)
    received_bytes: Mapping[GroupRank, int] = field(init=False)
    kept_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        sent: dict[GroupRank, int] = defaultdict(int)
        received: dict[GroupRank, int] = defaultdict(int)
        kept = 0
        for op in self.ops:
            nbytes = self.bytes_each(op)
            if op.stays:
                kept += nbytes
                continue
            sent[op.source] += nbytes * len(op.destinations)
            for rank in op.destinations:
                received[rank] += nbytes
        object.__setattr__(self, "sent_bytes", dict(sorted(sent.items())))
        object.__setattr__(self, "received_bytes", dict(sorted(received.items())))
        object.__setattr__(self, "kept_bytes", kept)
        object.__setattr__(self, "digest", self._hash())

    @property
    def redundancy(self) -> float:
        """Bytes received over bytes needed from others; 1.0 is exact, more is waste."""
        needed = sum(
            region.volume * itemsize(tensors.wire_dtype) * len(tensors.names)
            for tensors in self.classes
            for _, regions in tensors.needed
            for region in regions
        )
        missing = needed - self.kept_bytes
        return sum(self.received_bytes.values()) / missing if missing else 1.0

    def run(self, op: TransferOp) -> Run:
        """The moves of one op, one a tensor, to each of its destinations."""
        tensors = self.classes[op.tensors]
        return Run(
            tensors.names,
            op.first,
            op.last,
            op.region,
            tensors.source_dtype,
            tensors.wire_dtype,
        )

    def for_rank(self, rank: GroupRank) -> RankPlan:
        """The part of one rank."""
        sends: dict[GroupRank, list[Run]] = defaultdict(list)
        receives: dict[GroupRank, list[Run]] = defaultdict(list)
        local: list[Run] = []
        for op in self.ops:
            if rank not in op.destinations and rank != op.source:
                continue
            run = self.run(op)
            if op.stays:
                local.append(run)
            elif rank == op.source:
                for destination in op.destinations:
                    sends[destination].append(run)
            else:
                receives[op.source].append(run)
        return RankPlan(
            rank,
            {peer: Moves(runs) for peer, runs in sorted(sends.items())},
            {peer: Moves(runs) for peer, runs in sorted(receives.items())},
            Moves(local),
        )

    def transfers(self) -> Iterator[Transfer]:
        """The whole plan, tensor by tensor, sorted by name, sender and receiver."""
        ops_of: dict[int, list[TransferOp]] = defaultdict(list)
        for op in self.ops:
            ops_of[op.tensors].append(op)
        named = sorted(
            (name, index, position)
            for index, tensors in enumerate(self.classes)
            for position, name in enumerate(tensors.names)
        )
        for name, index, position in named:
            pairs: dict[tuple[GroupRank, GroupRank], list[Region]] = defaultdict(list)
            for op in ops_of[index]:
                if op.first <= position < op.last:
                    for destination in op.destinations:
                        pairs[op.source, destination].append(op.region)
            for (source, destination), regions in sorted(pairs.items()):
                yield Transfer(name, source, destination, tuple(sorted(regions)))

    def element_bytes(self, tensors: int) -> int:
        """Bytes that an element of a class takes on the wire."""
        return itemsize(self.classes[tensors].wire_dtype)

    def bytes_each(self, op: TransferOp) -> int:
        """Bytes that an op brings to each of its destinations."""
        return op.region.volume * self.element_bytes(op.tensors) * (op.last - op.first)

    def _hash(self) -> str:
        """Over everything that a rank acts on, in an encoding of plain lists.

        The text is that of one JSON document, made and hashed in parts: whole, it would be most of
        the memory that planning takes.
        """
        classes = (
            (tensors.names, tensors.shape, tensors.source_dtype, tensors.wire_dtype)
            for tensors in self.classes
        )
        ops = (
            (
                op.source,
                op.destinations,
                op.tensors,
                op.first,
                op.last,
                op.region.offset,
                op.region.shape,
            )
            for op in self.ops
        )
        digest = hashlib.sha256(f"[{json.dumps(_FORMAT)},[".encode())
        _update(digest, classes)
        digest.update(b"],[")
        _update(digest, ops)
        digest.update(b"]]")
        return digest.hexdigest()


def _update(digest: "hashlib._Hash", values: Iterable[object]) -> None:
    """Add the inside of a JSON list."""
    separator = ""
    rest = iter(values)
    while part := list(islice(rest, _PART)):
        digest.update((separator + json.dumps(part, separators=(",", ":"))[1:-1]).encode())
        separator = ","
