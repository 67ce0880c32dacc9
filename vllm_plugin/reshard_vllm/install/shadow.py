"""Shadows: storages in load layout, beside the live parameters.

Coordinate space: a shadow is flat; its element `i` is element `i` of the load-layout storage.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import prod

import torch

from reshard.layout.view import StridedView
from reshard_vllm.recording.landing import slot_of
from reshard_vllm.recording.loader_map import LoaderMap
from reshard_vllm.recording.replay import Environment
from reshard_vllm.recording.slots import Slot
from reshard_vllm.recording.tape import Note, Ref


class Shadow:
    """Storages of some slots, and the buffers of their programs.

    Attributes:
        flat: storages by slot key, 1-d, padded so that every recorded offset lies inside.
        stages: buffers of computations, by key, 1-d.
    """

    def __init__(self, recorded: LoaderMap, keys: Iterable[str], device: torch.device) -> None:
        self._landings = recorded.landings
        self._slots = {key: recorded.slots[key] for key in keys}
        self.flat = {
            key: torch.zeros(_extent(slot), dtype=slot.dtype, device=device)
            for key, slot in self._slots.items()
        }
        self.stages = {
            stage.key: torch.zeros(prod(stage.shape), dtype=stage.dtype, device=device)
            for stage in recorded.landings.stages
            if slot_of(stage.key) in self._slots
        }
        for key in self._slots:
            run(recorded.landings.constants.get(key, ()), self._within(key))

    @property
    def nbytes(self) -> int:
        """Memory of the shadow, in bytes."""
        return sum(t.nbytes for t in (*self.flat.values(), *self.stages.values()))

    def tensor(self, key: str) -> torch.Tensor:
        """A slot's parameter as the loader would see it."""
        slot = self._slots[key]
        return self.flat[key].as_strided(slot.shape, slot.stride, slot.offset)

    def named(self, key: str, name: str) -> torch.Tensor:
        """What one of a slot's names sees of its storage."""
        slot = self._slots[key]
        view = slot.views[slot.names.index(name)]
        return self.flat[key].as_strided(view.shape, view.stride, view.offset)

    def place(self, storage: str, view: StridedView) -> torch.Tensor:
        """A view of a slot's storage, or of a program's buffer."""
        flat = self.flat[storage] if storage in self.flat else self.stages[storage]
        return flat.as_strided(view.shape, view.stride, view.offset)

    def compute(self) -> None:
        """Run the loader's arithmetic on what has landed."""
        for key in self._slots:
            run(self._landings.programs.get(key, ()), self._within(key), self._staged)

    def _within(self, key: str) -> Callable[[StridedView], torch.Tensor]:
        flat = self.flat[key]
        return lambda view: flat.as_strided(view.shape, view.stride, view.offset)

    def _staged(self, ref: Ref) -> torch.Tensor:
        return self.stages[self._landings.stages[ref.storage].key].view(ref.view.shape)


def run(
    notes: Iterable[Note],
    place: Callable[[StridedView], torch.Tensor],
    staged: Callable[[Ref], torch.Tensor] | None = None,
) -> None:
    """Replay notes that write one slot.

    Args:
        notes: constants or a program, each standing alone.
        place: from a view of the slot's load-layout storage to where it is now.
        staged: what a program's reference to a checkpoint tensor stands for.
    """

    def load(ref: Ref) -> torch.Tensor:
        if ref.kind == "owned":
            return place(ref.view)
        if ref.constant is not None:
            return ref.constant
        assert staged is not None, "constants read no checkpoint tensor"
        return staged(ref)

    environment = Environment(load)
    with torch.no_grad():
        for note in notes:
            environment.step(note)


def _extent(slot: Slot) -> int:
    """Elements from the start of the storage to the last element of the parameter."""
    if 0 in slot.shape:
        return slot.offset
    last = sum((n - 1) * s for n, s in zip(slot.shape, slot.stride, strict=True))
    return slot.offset + last + 1


def coverage(recorded: LoaderMap, *, constants: bool = True) -> dict[str, int]:
    """Elements of each slot's parameter that the loader writes.

    Args:
        recorded: the loader's map.
        constants: whether to count those that it makes of constants alone.
    """
    written: dict[str, list[StridedView]] = defaultdict(list)
    for landing in recorded.landings.landings:
        written[landing.piece.storage].append(landing.piece.view)
    notes = [*recorded.landings.programs.items()]
    if constants:
        notes += recorded.landings.constants.items()
    for key, several in notes:
        written[key] += [
            note.written.view
            for note in several
            if note.written is not None and note.written.kind == "owned"
        ]
    return {key: _marked(slot, written.get(key, ())) for key, slot in recorded.slots.items()}


def constants_of(recorded: LoaderMap) -> dict[str, int]:
    """Elements of each slot's parameter that the loader makes of constants alone, where any."""
    arriving = coverage(recorded, constants=False)
    return {
        key: count - arriving[key]
        for key, count in coverage(recorded).items()
        if count > arriving[key]
    }


def _marked(slot: Slot, views: Iterable[StridedView]) -> int:
    marks = torch.zeros(_extent(slot), dtype=torch.bool)
    for view in views:
        if prod(view.shape):
            marks.as_strided(view.shape, view.stride, view.offset).fill_(True)
    return int(marks.as_strided(slot.shape, slot.stride, slot.offset).sum())
