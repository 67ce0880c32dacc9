"""Whose storage is whose, once the loader is done.

While a loader runs, a parameter may be given other storage (`param.data = ...`, a parameter that is
registered anew), and a loader may fill a buffer of its own before it copies it on. Only afterwards
is it known which storages belong to the model. Here the notes are rewritten so that every `owned`
reference is a parameter's final storage, and everything else that is written an intermediate.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch.utils._pytree import tree_map

from reshard.errors import RecordingError
from reshard_vllm.recording.replay import emptied
from reshard_vllm.recording.tape import Note, Ref, Tape, storage_of


def settle(tape: Tape, owned: Collection[int]) -> tuple[list[Note], dict[int, int]]:
    """The notes with the final owners.

    Args:
        tape: what the loader did.
        owned: storages of the model when the loader is done.

    Returns:
        the notes, and for each checkpoint tensor whose storage became a parameter's: by the made-up
        identity that the notes give the parameter's storage, the real one.

    Raises:
        RecordingError: the loader writes storage that was there before, and is no parameter's.
    """
    settler = _Settler(tape, frozenset(owned))
    notes = [*settler.dropped()]
    for note in tape.notes:
        notes += settler.rewritten(note)
    adopted = {-1 - at: s for at, s in enumerate(sorted(settler.sources_kept()))}
    notes += [settler.handed_over(fake, storage) for fake, storage in adopted.items()]
    return notes, adopted


class _Settler:
    def __init__(self, tape: Tape, owned: frozenset[int]) -> None:
        self._tape = tape
        self._owned = owned
        self._renamed = 0

    def dropped(self) -> Iterator[Note]:
        """Storages that parameters had, and lost: intermediates, with nothing in them."""
        for tensor in self._tape.owned:
            storage = storage_of(tensor)
            if storage not in self._owned:
                yield emptied(storage, tensor)

    def rewritten(self, note: Note) -> Iterator[Note]:
        """The note, and what it means for a storage that became a parameter's."""
        made = tuple(self._outside(ref) for ref in note.made)
        yield Note(
            note.operation,
            tree_map(self._settled, note.args),
            tree_map(self._settled, dict(note.kwargs)),
            None if note.written is None else self._relabelled(note.written),
            made,
        )
        for ref, outside in zip(note.made, made, strict=True):
            if ref is not None and outside is not None and ref.storage in self._owned:
                yield _copy(replace(ref, kind="owned"), outside)

    def sources_kept(self) -> set[int]:
        """Checkpoint tensors that a parameter was bound to."""
        return {s for s in self._owned if self._tape.kinds.get(s) == "source"}

    def handed_over(self, fake: int, storage: int) -> Note:
        """A parameter bound to a checkpoint tensor, as the copy that it amounts to."""
        source = self._tape.source(storage)
        return _copy(replace(source, kind="owned", storage=fake), source)

    def _outside(self, ref: Ref | None) -> Ref | None:
        """What an operation makes is not yet the parameter's."""
        if ref is None or ref.storage not in self._owned:
            return None if ref is None else replace(ref, kind="temporary")
        self._renamed += 1
        return replace(ref, kind="temporary", storage=-(1 << 40) - self._renamed)

    def _settled(self, leaf: object) -> object:
        return self._relabelled(leaf) if isinstance(leaf, Ref) else leaf

    def _relabelled(self, ref: Ref) -> Ref:
        if ref.kind in ("source", "constant"):
            return ref
        if ref.storage in self._owned:
            return replace(ref, kind="owned")
        if ref.kind == "foreign" and ref.storage not in self._tape.born:
            raise RecordingError(
                f"the loader writes {ref.view.shape} elements that no parameter or buffer holds"
            )
        return replace(ref, kind="temporary")


def _copy(written: Ref, source: Ref) -> Note:
    return Note(torch.ops.aten.copy_.default, (written, source), {}, written)
