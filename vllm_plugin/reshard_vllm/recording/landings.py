"""From a tape to landings: where each checkpoint element goes.

Coordinate spaces: source regions are global (checkpoint tensors are whole), places are in elements
of a parameter's load-layout storage, or of a staging buffer that feeds a computation.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch.utils._pytree import tree_map

from reshard.errors import RecordingError
from reshard.ids import FQN
from reshard.layout.align import align, align_elements
from reshard.layout.pieces import Piece
from reshard.layout.view import StridedView
from reshard_vllm.recording.replay import MOVEMENT, Environment, cone, numbered
from reshard_vllm.recording.tape import Note, Ref, Tape


@dataclass(frozen=True, slots=True)
class Landing:
    """Elements of one checkpoint tensor, and where they go.

    Attributes:
        name: canonical name.
        piece: region of the checkpoint tensor, and its view of the storage that gets it.
        dtype: of that storage: the elements are cast to it.
    """

    name: FQN
    piece: Piece
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Stage:
    """A buffer for checkpoint elements that a computation reads.

    Attributes:
        key: its storage key.
        shape: in elements; contiguous.
        dtype: the checkpoint tensor's.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class Landings:
    """What one loader does on one rank.

    Attributes:
        landings: pure movement (and one cast).
        constants: notes that write constants (padding), by parameter.
        programs: notes to run after the movement, by parameter, in order.
        stages: buffers that the programs read.
    """

    landings: list[Landing] = field(default_factory=list)
    constants: dict[str, list[Note]] = field(default_factory=lambda: defaultdict(list))
    programs: dict[str, list[Note]] = field(default_factory=lambda: defaultdict(list))
    stages: list[Stage] = field(default_factory=list)


def resolve(
    tape: Tape,
    sources: Mapping[int, tuple[FQN, torch.Tensor]],
    owned: Mapping[int, tuple[str, torch.Tensor]],
) -> Landings:
    """Follow every write of a parameter back to the checkpoint.

    Args:
        tape: what the loader did.
        sources: checkpoint tensors by storage.
        owned: parameters and buffers, by storage: key and one tensor of that storage.

    Raises:
        RecordingError: a write that cannot be followed, or one into storage of nobody.
    """
    resolver = _Resolver(tape.notes, sources, owned)
    for at, note in enumerate(tape.notes):
        if note.written is not None and note.written.kind == "owned":
            resolver.write(at, note)
    return resolver.found


class _Resolver:
    def __init__(
        self,
        notes: Sequence[Note],
        sources: Mapping[int, tuple[FQN, torch.Tensor]],
        owned: Mapping[int, tuple[str, torch.Tensor]],
    ) -> None:
        self._notes = notes
        self._sources = sources
        self._owned = owned
        self._numbers = itertools.count()
        self.found = Landings()

    def write(self, at: int, note: Note) -> None:
        """Classify one write of a parameter."""
        assert note.written is not None
        key, tensor = self._owner(note)
        if note.written.dtype != tensor.dtype:
            raise RecordingError(f"{key} is written as {note.written.dtype}, it is {tensor.dtype}")
        source = note.args[1] if note.name == "copy_" and len(note.args) > 1 else None
        if note.name in ("fill_", "zero_") or (isinstance(source, Ref) and _is_constant(source)):
            if prod(note.written.view.shape):
                self.found.constants[key].append(note)
            return
        if self.found.programs.get(key):
            # Once something was computed in place, later writes keep their order.
            self._compute(at, key, note)
        elif isinstance(source, Ref) and source.kind == "source":
            self._move(key, note.written, source)
        elif isinstance(source, Ref) and source.kind == "temporary":
            before = cone(self._notes[:at], source)
            if all(step.name in MOVEMENT for step in before):
                self._follow(key, note.written, source, before)
            else:
                self._compute(at, key, note)
        else:
            self._compute(at, key, note)

    def _owner(self, note: Note) -> tuple[str, torch.Tensor]:
        assert note.written is not None
        if note.written.storage not in self._owned:
            raise RecordingError(
                f"the loader writes {note.written.view.shape} elements that no parameter holds"
            )
        return self._owned[note.written.storage]

    def _move(self, key: str, written: Ref, source: Ref) -> None:
        name, whole = self._sources[source.storage]
        if source.dtype != whole.dtype:
            raise RecordingError(f"{name}: the loader reads {whole.dtype} as {source.dtype}")
        source_view = _broadcast(source.view, written.view.shape)
        for region, view in align(tuple(whole.shape), source_view, written.view):
            self.found.landings.append(Landing(name, Piece(region, key, view), written.dtype))

    def _follow(self, key: str, written: Ref, source: Ref, before: Sequence[Note]) -> None:
        """Movement that no view expresses: replay it on element numbers."""
        used = sorted(
            {r.storage for n in before for r in n.refs() if r.kind == "source"},
            key=lambda storage: self._sources[storage][0],
        )
        # Number 0 is "no element" (zeros that the loader pads with).
        bases = np.cumsum([1, *(self._sources[s][1].numel() for s in used)])
        first = dict(zip(used, bases.tolist(), strict=False))

        def load(ref: Ref) -> torch.Tensor:
            if ref.kind == "source":
                whole = self._sources[ref.storage][1]
                start = first[ref.storage]
                numbers = torch.arange(start, start + whole.numel(), dtype=torch.int64)
                return numbers.as_strided(ref.view.shape, ref.view.stride, ref.view.offset)
            if ref.kind == "constant" and ref.constant is not None:
                integral = not ref.dtype.is_floating_point
                return ref.constant if integral else torch.zeros(ref.view.shape, dtype=torch.int64)
            raise RecordingError(f"{key}: movement out of a parameter is not followed")

        environment = Environment(load)
        for note in before:
            environment.step(numbered(note))
        ids = environment.value(source).broadcast_to(written.view.shape).reshape(-1).numpy()
        for storage in used:
            name, whole = self._sources[storage]
            start = first[storage]
            inside = (ids >= start) & (ids < start + whole.numel())
            own = np.where(inside, ids - start, -1)
            for region, view in align_elements(tuple(whole.shape), own, written.view):
                self.found.landings.append(Landing(name, Piece(region, key, view), written.dtype))
        if (ids <= 0).any():
            raise RecordingError(f"{key}: the loader mixes zeros into moved elements")

    def _compute(self, at: int, key: str, note: Note) -> None:
        """Keep the arithmetic; stage exactly the checkpoint elements that it reads."""
        steps = [*self._cone_of(at, note), note]
        self.found.programs[key] += [self._staged(key, step) for step in steps]

    def _cone_of(self, at: int, note: Note) -> list[Note]:
        steps: list[Note] = []
        for ref in note.refs():
            if ref.kind == "temporary":
                steps += [s for s in cone(self._notes[:at], ref) if s not in steps]
        return steps

    def _staged(self, key: str, note: Note) -> Note:
        def stage(leaf: object) -> object:
            if not isinstance(leaf, Ref) or leaf.kind != "source":
                return leaf
            name, whole = self._sources[leaf.storage]
            buffer = Stage(f"{key}#{next(self._numbers)}", leaf.view.shape, leaf.dtype)
            contiguous = StridedView.contiguous(leaf.view.shape)
            for region, view in align(tuple(whole.shape), leaf.view, contiguous):
                self.found.landings.append(
                    Landing(name, Piece(region, buffer.key, view), leaf.dtype)
                )
            self.found.stages.append(buffer)
            return Ref("constant", len(self.found.stages) - 1, contiguous, leaf.dtype)

        return Note(
            note.operation,
            tree_map(stage, note.args),
            tree_map(stage, dict(note.kwargs)),
            note.written,
            note.made,
        )


def _is_constant(ref: Ref) -> bool:
    return ref.kind == "constant"


def _broadcast(view: StridedView, shape: tuple[int, ...]) -> StridedView:
    """The source view as `copy_` sees it: leading and extent-1 dims expanded."""
    if view.shape == shape:
        return view
    missing = len(shape) - len(view.shape)
    extents = (1,) * missing + view.shape
    strides = (0,) * missing + view.stride
    expanded = tuple(
        0 if extent == 1 and wanted != 1 else step
        for extent, wanted, step in zip(extents, shape, strides, strict=True)
    )
    if prod(shape) and any(e not in (1, w) for e, w in zip(extents, shape, strict=True)):
        raise RecordingError(f"a view of {view.shape} is copied into one of {shape}")
    return StridedView(view.offset, shape, expanded)
