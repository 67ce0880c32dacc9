"""Data movement that no view can express (cat, clone, index, pad), replayed on element numbers.

Every element of the checkpoint tensors has a positive number, every constant that the loader mixes
in a negative one; zero is memory that nobody has written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map

from reshard.ids import FQN
from reshard_vllm.recording.replay import Environment
from reshard_vllm.recording.tape import INDEX_ARGUMENTS, Note, Ref

Sources = Mapping[int, tuple[FQN, torch.Tensor]]
"""Checkpoint tensors, by storage."""

_aten = torch.ops.aten

_COPIES: Final = frozenset({"clone", "_to_copy", "contiguous", "_unsafe_view", "_reshape_copy"})
_MOVES: Final = frozenset(
    {
        *("cat", "stack", "flip", "roll", "repeat", "copy_"),
        *("index", "index_select", "gather", "index_put_", "index_copy_"),
    }
)
_EMPTY: Final = frozenset(
    {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like"}
)
_FILLED: Final = {
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), 0.0),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), 1.0),
}
_FILLS: Final = frozenset({"zero_", "fill_", "constant_pad_nd"})


def is_movement(notes: Sequence[Note], sources: Sources) -> bool:
    """Whether `notes` place elements and constants, and compute nothing.

    A cast computes, unless all casts of an element together are the one from its checkpoint dtype
    to the target's (`cast_once`).
    """
    made = {ref.storage: ref.dtype for note in notes for ref in note.made if ref is not None}
    return all(_moves(note, made, sources) for note in notes)


def _moves(note: Note, made: Mapping[int, torch.dtype], sources: Sources) -> bool:
    if note.name not in {*_COPIES, *_MOVES, *_EMPTY, *_FILLED, *_FILLS}:
        return False
    if note.name in ("index_put_",) and True in (*note.args[3:], note.kwargs.get("accumulate")):
        return False
    indices = _index_refs(note)

    def is_whole(ref: Ref) -> bool:
        """Whether the elements are seen as what they are."""
        if ref.kind == "source":
            return ref.dtype == sources[ref.storage][1].dtype and ref not in indices
        if ref.kind == "temporary":
            return ref.dtype == made.get(ref.storage) and ref not in indices
        return ref.kind == "constant"

    return all(is_whole(ref) for ref in note.refs())


def _index_refs(note: Note) -> list[Ref]:
    at = INDEX_ARGUMENTS.get(note.name)
    return [] if at is None else Note(note.operation, (note.args[at],), {}).refs()


def cast_once(notes: Sequence[Note], target: Ref, written: torch.dtype) -> bool:
    """Whether each element's casts on the way come to one cast to `written`.

    An element lies on a *grid*: the dtype that all its possible values have. It starts on that of
    its checkpoint tensor, and leaves it at most once, for the grid of `written`.
    """
    grids: dict[int, set[tuple[torch.dtype, torch.dtype]]] = {}

    def at(ref: Ref) -> set[tuple[torch.dtype, torch.dtype]]:
        if ref.kind == "temporary":
            return grids.get(ref.storage, set())
        return {(ref.dtype, ref.dtype)}

    for note in notes:
        indices = _index_refs(note)
        moved = {pair for ref in note.refs() if ref not in indices for pair in at(ref)}
        for ref in (note.written, *note.made):
            if ref is None:
                continue
            landed = {(start, _grid(start, grid, ref.dtype)) for start, grid in moved}
            if any(grid is None for _, grid in landed):
                return False
            kept = {(start, grid) for start, grid in landed if grid is not None}
            grids[ref.storage] = grids.get(ref.storage, set()) | kept
    return all(grid in (start, written) for start, grid in at(target))


def _grid(start: torch.dtype, grid: torch.dtype, entered: torch.dtype) -> torch.dtype | None:
    if _lossless(grid, entered):
        return grid
    return entered if grid == start else None


def _lossless(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every value of `narrow` is one of `wide`."""
    if narrow == wide:
        return True
    if not (narrow.is_floating_point and wide.is_floating_point):
        return False
    try:
        a, b = torch.finfo(narrow), torch.finfo(wide)
    except (RuntimeError, TypeError):
        return False
    finest = (a.tiny * a.eps, b.tiny * b.eps)
    return b.eps <= a.eps and b.max >= a.max and finest[1] <= finest[0]


@dataclass(frozen=True, slots=True)
class Followed:
    """Where every element of one write comes from.

    Attributes:
        elements: checkpoint name, its shape, and the flat canonical element number of each place of
            the write, row-major; -1 where the place holds none of this tensor.
        constants: number of each place that holds a constant; -1 where it holds none.
        values: the constants, shaped as the write.

    Places with neither are covered by nothing: memory that the loader took and never wrote.
    """

    elements: tuple[tuple[FQN, tuple[int, ...], npt.NDArray[np.int64]], ...]
    constants: npt.NDArray[np.int64]
    values: torch.Tensor


def follow(notes: Sequence[Note], target: Ref, written: Ref, sources: Sources) -> Followed:
    """Replay `notes`, all movement, on element numbers."""
    numbering = _Numbering(notes, sources)
    environment = Environment(numbering.load)
    for note in notes:
        environment.step(numbering.translated(note))
    numbers = environment.value(_numbered(target)).broadcast_to(written.view.shape)
    flat = numbers.reshape(-1).numpy()
    constants = np.where(flat < 0, np.arange(flat.size), -1)
    values = numbering.values[torch.from_numpy(np.where(flat < 0, -flat - 1, 0))]
    return Followed(
        tuple(numbering.by_source(flat)),
        constants,
        values.to(written.dtype).reshape(written.view.shape),
    )


class _Numbering:
    def __init__(self, notes: Sequence[Note], sources: Sources) -> None:
        used = {r.storage for note in notes for r in note.refs() if r.kind == "source"}
        self._sources = {s: sources[s] for s in sorted(used, key=lambda s: sources[s][0])}
        self._first: dict[int, int] = {}
        self._count = 1
        for storage, (_, whole) in self._sources.items():
            self._first[storage] = self._count
            self._count += whole.numel()
        self._values: list[torch.Tensor] = []
        self._held = 0

    def load(self, ref: Ref) -> torch.Tensor:
        """Numbers of a checkpoint tensor's elements, or plain data."""
        if ref.kind == "source":
            start = self._first[ref.storage]
            count = self._sources[ref.storage][1].numel()
            numbers = torch.arange(start, start + count, dtype=torch.int64)
            return numbers.as_strided(ref.view.shape, ref.view.stride, ref.view.offset)
        assert ref.constant is not None
        return ref.constant

    def translated(self, note: Note) -> Note:
        """The note as it acts on numbers."""
        made = tuple(_numbered(ref) if ref is not None else None for ref in note.made)
        written = _numbered(note.written) if note.written is not None else None
        name = note.name
        if name in _EMPTY or name in _FILLED:
            number = 0 if name in _EMPTY else self._number(_FILLED[name])
            shape = made[0].view.shape if made and made[0] is not None else ()
            return Note(_aten.full.default, (shape, number), {"dtype": torch.int64}, None, made)
        args = self._data(note)
        if name in _COPIES:
            return Note(_aten.clone.default, args[:1], {}, None, made)
        if name == "constant_pad_nd":
            number = self._number(args[2] if len(args) > 2 else 0.0)
            return Note(note.operation, (*args[:2], number), {}, None, made)
        if name == "zero_":
            return Note(_aten.fill_.Scalar, (args[0], self._number(0.0)), {}, written)
        if name == "fill_" and not isinstance(args[1], Ref):
            return Note(_aten.fill_.Scalar, (args[0], self._number(args[1])), {}, written)
        return Note(note.operation, args, note.kwargs, written, made)

    def by_source(
        self, flat: npt.NDArray[np.int64]
    ) -> Iterator[tuple[FQN, tuple[int, ...], npt.NDArray[np.int64]]]:
        """The numbers of each checkpoint tensor, from zero; -1 elsewhere."""
        for storage, (name, whole) in self._sources.items():
            start = self._first[storage]
            inside = (flat >= start) & (flat < start + whole.numel())
            if inside.any():
                yield name, tuple(whole.shape), np.where(inside, flat - start, -1)

    @property
    def values(self) -> torch.Tensor:
        """All constants [count], and at least one."""
        return torch.cat([*self._values, torch.zeros(1, dtype=torch.float64)])

    def _data(self, note: Note) -> tuple[object, ...]:
        """Arguments with constants numbered, except those that say where."""
        at = INDEX_ARGUMENTS.get(note.name)

        def number(leaf: object) -> object:
            if not isinstance(leaf, Ref):
                return leaf
            if leaf.kind != "constant" or leaf.constant is None:
                return _numbered(leaf)
            return replace(_numbered(leaf), constant=self._numbers(leaf.constant))

        return tuple(
            arg if position == at else tree_map(number, arg)
            for position, arg in enumerate(note.args)
        )

    def _numbers(self, constant: torch.Tensor) -> torch.Tensor:
        start = -1 - self._held
        self._values.append(constant.detach().reshape(-1).to(torch.float64))
        self._held += constant.numel()
        return torch.arange(start, start - constant.numel(), -1).reshape(constant.shape)

    def _number(self, value: object) -> int:
        assert isinstance(value, bool | int | float)
        return int(self._numbers(torch.tensor([value], dtype=torch.float64))[0])


def _numbered(ref: Ref) -> Ref:
    return ref if ref.kind == "source" else replace(ref, dtype=torch.int64)
