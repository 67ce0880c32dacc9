"""Replay: run noted operations again, on other data.

On element numbers, to see where data movement that no view can express (cat, clone, index) takes
each element; on real data, to repeat a loader's arithmetic.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils._pytree import tree_flatten, tree_map

from reshard.errors import RecordingError
from reshard_vllm.recording.tape import Note, Ref

MOVEMENT = frozenset(
    {
        *("clone", "contiguous", "_to_copy", "copy_", "_unsafe_view", "_reshape_copy"),
        *("cat", "stack", "index", "index_select", "gather", "flip", "roll", "repeat"),
        *("new_zeros", "new_empty", "zeros_like", "empty_like", "zero_", "constant_pad_nd"),
    }
)
"""Operations that place elements (or zeros) and compute nothing."""


def cone(notes: Sequence[Note], target: Ref) -> list[Note]:
    """The notes that `target`, an intermediate, depends on, in order."""
    wanted = {target.storage}
    kept: list[Note] = []
    for note in reversed(notes):
        writes = note.written is not None and note.written.storage in wanted
        if writes or wanted.intersection(note.made):
            kept.append(note)
            wanted |= {ref.storage for ref in note.refs() if ref.kind == "temporary"}
    return list(reversed(kept))


def run(notes: Sequence[Note], load: Callable[[Ref], torch.Tensor]) -> "Environment":
    """Run `notes` in order; `load` gives the data of sources, parameters and constants."""
    environment = Environment(load)
    for note in notes:
        environment.step(note)
    return environment


class Environment:
    """The intermediates of a replay."""

    def __init__(self, load: Callable[[Ref], torch.Tensor]) -> None:
        self._load = load
        self._made: dict[int, torch.Tensor] = {}

    def value(self, ref: Ref) -> torch.Tensor:
        """The data that `ref` stands for."""
        if ref.kind != "temporary":
            return self._load(ref)
        if ref.storage not in self._made:
            raise RecordingError(f"an intermediate of {ref.view.shape} was never made")
        whole = self._made[ref.storage]
        return whole.as_strided(ref.view.shape, ref.view.stride, ref.view.offset)

    def step(self, note: Note) -> None:
        """Run one note."""

        def resolve(leaf: object) -> object:
            return self.value(leaf) if isinstance(leaf, Ref) else leaf

        kwargs: Mapping[str, object] = tree_map(resolve, dict(note.kwargs))
        if "device" in kwargs:
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}
        made = note.operation(*tree_map(resolve, note.args), **kwargs)
        outputs = [t for t in tree_flatten(made)[0] if isinstance(t, torch.Tensor)]
        self._made |= dict(zip(note.made, outputs, strict=False))


def numbered(note: Note) -> Note:
    """A movement note made fit for element numbers: casts do not change which element it is."""
    if note.name != "_to_copy":
        return note
    return Note(torch.ops.aten.clone.default, note.args[:1], {}, note.written, note.made)
