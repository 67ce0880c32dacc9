"""Transfer plans: who sends which region to whom, as data.

A plan is made from the layouts alone, printed, hashed, compared and tested without a device. It
holds canonical regions only: strides and storages never leave their rank.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from reshard.dtypes import DType, itemsize
from reshard.ids import FQN, GroupRank
from reshard.layout.region import Region
from reshard.plan.classes import TensorClass


@dataclass(frozen=True, slots=True)
class Move:
    """One region of one tensor, on its way from one rank to another.

    Attributes:
        name: canonical name.
        region: global region, in elements; its elements travel row-major.
        source_dtype: what the sender reads.
        wire_dtype: what travels: the sender casts once.
    """

    name: FQN
    region: Region
    source_dtype: DType
    wire_dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.region.volume * itemsize(self.wire_dtype)


@dataclass(frozen=True, slots=True)
class TransferOp:
    """The same region of some tensors of a class, from one rank to another.

    Attributes:
        source: group rank of the sender.
        destination: group rank of the receiver; equal to `source` where a rank keeps its own.
        tensors: position of the class in `TransferPlan.classes`.
        first, last: names `first <= i < last` of the class.
        region: global region of each of these tensors.
    """

    source: int
    destination: int
    tensors: int
    first: int
    last: int
    region: Region


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does. The moves of a pair are in the same order on both ends.

    Attributes:
        rank: group rank.
        sends: moves by destination.
        receives: moves by source.
        local: moves from this rank to itself.
    """

    rank: GroupRank
    sends: Mapping[GroupRank, tuple[Move, ...]]
    receives: Mapping[GroupRank, tuple[Move, ...]]
    local: tuple[Move, ...]


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
    """

    classes: tuple[TensorClass, ...]
    ops: tuple[TransferOp, ...]
    bounds: Bounds
    unused_sources: tuple[FQN, ...]
    digest: str = field(init=False)
    sent_bytes: Mapping[GroupRank, int] = field(init=False)
    received_bytes: Mapping[GroupRank, int] = field(init=False)

    def __post_init__(self) -> None:
        sent: dict[GroupRank, int] = defaultdict(int)
        received: dict[GroupRank, int] = defaultdict(int)
        for op in self.ops:
            if op.source != op.destination:
                sent[GroupRank(op.source)] += self._op_bytes(op)
                received[GroupRank(op.destination)] += self._op_bytes(op)
        object.__setattr__(self, "sent_bytes", dict(sorted(sent.items())))
        object.__setattr__(self, "received_bytes", dict(sorted(received.items())))
        object.__setattr__(self, "digest", self._hash())

    @property
    def redundancy(self) -> float:
        """Bytes received over bytes needed from others; 1.0 is exact, more is waste."""
        needed = 0
        for tensors in self.classes:
            each = itemsize(tensors.wire_dtype) * len(tensors.names)
            needed += each * sum(r.volume for _, regions in tensors.needed for r in regions)
        kept = sum(self._op_bytes(op) for op in self.ops if op.source == op.destination)
        received = sum(self.received_bytes.values())
        return received / (needed - kept) if needed - kept else 1.0

    def moves(self, op: TransferOp) -> Iterator[Move]:
        """The moves of one op, one a tensor."""
        tensors = self.classes[op.tensors]
        for name in tensors.names[op.first : op.last]:
            yield Move(name, op.region, tensors.source_dtype, tensors.wire_dtype)

    def for_rank(self, rank: GroupRank) -> RankPlan:
        """The part of one rank."""
        sends: dict[GroupRank, list[Move]] = defaultdict(list)
        receives: dict[GroupRank, list[Move]] = defaultdict(list)
        local: list[Move] = []
        for op in self.ops:
            if rank == op.source == op.destination:
                local += self.moves(op)
            elif rank == op.source:
                sends[GroupRank(op.destination)] += self.moves(op)
            elif rank == op.destination:
                receives[GroupRank(op.source)] += self.moves(op)
        return RankPlan(
            rank,
            {peer: tuple(moves) for peer, moves in sorted(sends.items())},
            {peer: tuple(moves) for peer, moves in sorted(receives.items())},
            tuple(local),
        )

    def _op_bytes(self, op: TransferOp) -> int:
        size = itemsize(self.classes[op.tensors].wire_dtype)
        return prod(op.region.shape) * size * (op.last - op.first)

    def _hash(self) -> str:
        """Over everything that a rank acts on, in an encoding of plain lists."""
        digest = hashlib.sha256()
        for tensors in self.classes:
            digest.update(
                json.dumps(
                    [tensors.names, tensors.shape, tensors.source_dtype, tensors.wire_dtype]
                ).encode()
            )
        for op in self.ops:
            region = (*op.region.offset, *op.region.shape)
            line = (op.source, op.destination, op.tensors, op.first, op.last, *region)
            digest.update(repr(line).encode())
        return digest.hexdigest()
