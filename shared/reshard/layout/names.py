"""Many canonical names as few patterns: the layers and experts of a model are counted, not listed.

`model.layers.0.w` to `model.layers.60.w` is one pattern: the texts between the numbers, and the
numbers. Not here: what the names stand for.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from reshard.errors import LayoutError
from reshard.ids import FQN

_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")
"""Numbers that are written back as they were: no leading zeros, of bounded length."""

MAX_NAMES = 1 << 24
"""Most names that a set of patterns may stand for."""

Runs = tuple[int, ...]
"""Ascending numbers as start and count, by turns: 0, 1, 2, 7 is (0, 3, 7, 1)."""

_Axes = tuple[tuple[int, ...], ...]
"""The numbers at each place; together they stand for all combinations."""


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Names that differ in their numbers alone: all combinations of some numbers.

    Attributes:
        texts: what stands between the numbers, one more than there are numbers.
        numbers: at each place.
    """

    texts: tuple[str, ...]
    numbers: tuple[Runs, ...]

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.numbers) + 1:
            raise LayoutError(
                f"{len(self.texts)} texts do not go round {len(self.numbers)} numbers: {self.texts}"
            )
        for runs in self.numbers:
            if len(runs) % 2 or any(n < 0 for n in runs):
                raise LayoutError(f"malformed runs of numbers {runs} in a pattern of names")

    @property
    def count(self) -> int:
        """How many names it stands for."""
        return prod(sum(runs[1::2]) for runs in self.numbers)


def pack_names(names: Iterable[FQN]) -> tuple[NamePattern, ...]:
    """Patterns that together stand for `names`, each once.

    >>> pack_names(FQN(f"layers.{i}.w") for i in range(61))
    (NamePattern(texts=('layers.', '.w'), numbers=((0, 61),)),)
    """
    found: dict[tuple[str, ...], set[tuple[int, ...]]] = defaultdict(set)
    for name in names:
        parts = _NUMBER.split(name)
        found[tuple(parts[0::2])].add(tuple(map(int, parts[1::2])))
    return tuple(
        NamePattern(texts, tuple(map(pack_numbers, axes)))
        for texts, places in sorted(found.items())
        for axes in _products(places)
    )


def unpack_names(patterns: Iterable[NamePattern]) -> tuple[FQN, ...]:
    """The names, sorted.

    Raises:
        LayoutError: too many.
    """
    patterns = tuple(patterns)
    count = sum(pattern.count for pattern in patterns)
    if count > MAX_NAMES:
        raise LayoutError(f"{count} tensor names are over the limit of {MAX_NAMES}")
    names: list[FQN] = []
    for pattern in patterns:
        first, *rest = pattern.texts
        # Each number with the text that follows it: a name is one join.
        places = (
            [f"{number}{text}" for number in unpack_numbers(runs)]
            for runs, text in zip(pattern.numbers, rest, strict=True)
        )
        names += [FQN(first + "".join(parts)) for parts in product(*places)]
    return tuple(sorted(names))


def _products(places: set[tuple[int, ...]]) -> list[_Axes]:
    """Split tuples of numbers into sets of combinations."""
    axes = tuple(tuple(sorted(set(numbers))) for numbers in zip(*places, strict=True))
    if prod(map(len, axes)) == len(places):
        return [axes]
    # Not all combinations: those that agree in what may follow their first number go together.
    following: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for first, *rest in places:
        following[first].add(tuple(rest))
    together: dict[frozenset[tuple[int, ...]], list[int]] = defaultdict(list)
    for first, rests in sorted(following.items()):
        together[frozenset(rests)].append(first)
    return [
        (tuple(firsts), *axes)
        for rests, firsts in together.items()
        for axes in sorted(_products(set(rests)))
    ]


def pack_numbers(numbers: Sequence[int]) -> Runs:
    """Ascending numbers as runs.

    >>> pack_numbers((0, 1, 2, 7))
    (0, 3, 7, 1)
    """
    runs: list[int] = []
    for number in numbers:
        if runs and runs[-2] + runs[-1] == number:
            runs[-1] += 1
        else:
            runs += (number, 1)
    return tuple(runs)


def unpack_numbers(runs: Runs) -> tuple[int, ...]:
    """The numbers of `runs`.

    >>> unpack_numbers((0, 3, 7, 1))
    (0, 1, 2, 7)
    """
    return tuple(
        number
        for start, count in zip(runs[0::2], runs[1::2], strict=True)
        for number in range(start, start + count)
    )
