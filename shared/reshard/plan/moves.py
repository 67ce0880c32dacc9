"""Moves: what one rank sends, receives or keeps, tensor by tensor.

A rank of a large model has millions of moves, but few runs of them: tensors of a class share a
region. `Moves` is the sequence of them all, made as it is walked.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

from reshard.dtypes import DType, itemsize
from reshard.ids import FQN, GroupRank
from reshard.layout.region import Region


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
class Run:
    """The same region of consecutive tensors of a class.

    Attributes:
        names: canonical names of the class; shared, not copied.
        first, last: the run's names are `names[first:last]`.
        region: global region of each of these tensors.
        source_dtype: what the sender reads.
        wire_dtype: what travels.
    """

    names: tuple[FQN, ...]
    first: int
    last: int
    region: Region
    source_dtype: DType
    wire_dtype: DType

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, at: int) -> Move:
        name = self.names[self.first + at]
        return Move(name, self.region, self.source_dtype, self.wire_dtype)


class Moves(Sequence[Move]):
    """The moves of some runs, one after the other.

    >>> names = (FQN("a"), FQN("b"))
    >>> moves = Moves([Run(names, 0, 2, Region((0,), (4,)), "float32", "bfloat16")])
    >>> len(moves), moves[1].name, moves.nbytes
    (2, 'b', 16)
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = tuple(runs)
        self._ends = tuple(accumulate(map(len, self._runs)))

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, of all moves together."""
        return sum(len(run) * run[0].nbytes for run in self._runs if len(run))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Move]:
        for run in self._runs:
            for at in range(len(run)):
                yield run[at]

    @overload
    def __getitem__(self, index: int) -> Move: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Move, ...]: ...
    def __getitem__(self, index: int | slice) -> Move | tuple[Move, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"move {index} of {len(self)}")
        number = bisect_right(self._ends, at)
        return self._runs[number][at - (self._ends[number - 1] if number else 0)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Moves({len(self)} moves, {self.nbytes} bytes)"


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
    sends: Mapping[GroupRank, Sequence[Move]]
    receives: Mapping[GroupRank, Sequence[Move]]
    local: Sequence[Move]
