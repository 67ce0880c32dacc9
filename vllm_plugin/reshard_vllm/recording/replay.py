"""Replay: run noted operations again, on other data.

On real data, to repeat a loader's arithmetic; `numbers.py` does it on element numbers.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch.utils._pytree import tree_flatten, tree_map

from reshard.errors import RecordingError
from reshard.layout.view import StridedView
from reshard_vllm.recording.tape import Note, Ref


class Cones:
    """Which notes an intermediate, or a parameter that another one is copied from, depends on."""

    def __init__(self, notes: Sequence[Note]) -> None:
        self._notes = notes
        self._by_storage: dict[int, list[int]] = defaultdict(list)
        for at, note in enumerate(notes):
            for ref in (note.written, *note.made):
                if ref is not None:
                    self._by_storage[ref.storage].append(at)

    def before(self, at: int, own: Collection[int]) -> tuple[int, ...]:
        """The notes that note `at` depends on, in order.

        Args:
            at: number of a note.
            own: storages of the parameter that it writes; what happened to them is not followed.
        """
        todo = [at]
        kept: set[int] = set()
        while todo:
            reader = todo.pop()
            for ref in self._notes[reader].refs():
                if ref.kind in ("temporary", "owned") and ref.storage not in own:
                    writers = self._by_storage[ref.storage]
                    fresh = {w for w in writers[: bisect_left(writers, reader)] if w not in kept}
                    kept |= fresh
                    todo += fresh
        return tuple(sorted(kept))


class Environment:
    """The intermediates of a replay.

    Each has the strides that it had when it was recorded: an operation on other data may lay its
    output out otherwise, and the notes speak in strides.
    """

    def __init__(self, load: Callable[[Ref], torch.Tensor]) -> None:
        self._load = load
        self._made: dict[int, torch.Tensor] = {}

    def value(self, ref: Ref) -> torch.Tensor:
        """The data that `ref` stands for."""
        if ref.kind != "temporary":
            return self._load(ref)
        if ref.storage not in self._made:
            raise RecordingError(f"an intermediate of {ref.view.shape} was never made")
        flat = self._made[ref.storage]
        if flat.dtype != ref.dtype:
            flat = flat.view(ref.dtype)
        return flat.as_strided(ref.view.shape, ref.view.stride, ref.view.offset)

    def step(self, note: Note) -> None:
        """Run one note."""

        def resolve(leaf: object) -> object:
            return self.value(leaf) if isinstance(leaf, Ref) else leaf

        kwargs: Mapping[str, object] = tree_map(resolve, dict(note.kwargs))
        if "device" in kwargs:
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}
        result = note.operation(*tree_map(resolve, note.args), **kwargs)
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        if note.written is None:
            for ref, output in zip(note.made, outputs, strict=True):
                if ref is not None:
                    self._keep(ref, output)

    def _keep(self, ref: Ref, output: torch.Tensor) -> None:
        before = self._made.get(ref.storage)
        flat = before
        if before is None or before.dtype != ref.dtype or before.numel() < extent(ref):
            flat = torch.empty(extent(ref), dtype=ref.dtype, device=output.device)
            if before is not None and before.dtype == ref.dtype:
                flat[: before.numel()] = before  # made part by part
            self._made[ref.storage] = flat
        assert flat is not None
        flat.as_strided(ref.view.shape, ref.view.stride, ref.view.offset).copy_(output)


def extent(ref: Ref) -> int:
    """Elements from the start of the storage to the last element of `ref`."""
    if 0 in ref.view.shape:
        return ref.view.offset
    steps = zip(ref.view.shape, ref.view.stride, strict=True)
    return ref.view.offset + 1 + sum((n - 1) * step for n, step in steps)


def emptied(storage: int, tensor: torch.Tensor) -> Note:
    """A note that makes an intermediate of `tensor`'s storage, with nothing in it."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    made = Ref("temporary", storage, StridedView.contiguous((elements,)), tensor.dtype)
    operation = torch.ops.aten.empty.memory_format
    return Note(operation, ([elements],), {"dtype": tensor.dtype}, None, (made,))
