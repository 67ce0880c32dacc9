"""Boxes in a global tensor.

Coordinate space: global, in elements of the whole (canonical) tensor. Not here: strides,
storages, ranks.
"""

from dataclasses import dataclass
from math import prod

from reshard.errors import LayoutError


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A half-open box of a global tensor, of any rank, 0-d and empty included.

    Attributes:
        offset: first element of the box in each dim, in global elements.
        shape: extent of the box in each dim, in elements.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise LayoutError(f"offset {self.offset} and shape {self.shape} differ in rank")
        if any(o < 0 for o in self.offset) or any(n < 0 for n in self.shape):
            raise LayoutError(f"negative offset {self.offset} or shape {self.shape}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Region":
        """The region that is all of a tensor of `shape`."""
        return cls((0,) * len(shape), shape)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def volume(self) -> int:
        """Number of elements; 1 for 0-d."""
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last element in each dim."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def __str__(self) -> str:
        """As slices, for messages: `[0:4, 2:6]`."""
        spans = (f"{start}:{end}" for start, end in zip(self.offset, self.end, strict=True))
        return f"[{', '.join(spans)}]"

    def translate(self, by: tuple[int, ...]) -> "Region":
        """The same box moved by `by` elements in each dim.

        >>> Region((2, 0), (1, 4)).translate((3, 1))
        Region(offset=(5, 1), shape=(1, 4))
        """
        return Region(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.shape)

    def intersect(self, other: "Region") -> "Region | None":
        """The elements in both boxes, or None where there are none.

        >>> Region((0, 0), (4, 8)).intersect(Region((2, 6), (4, 4)))
        Region(offset=(2, 6), shape=(2, 2))
        """
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(a, b) - o for a, b, o in zip(self.end, other.end, offset, strict=True))
        if any(n <= 0 for n in shape):
            return None
        return Region(offset, shape)
