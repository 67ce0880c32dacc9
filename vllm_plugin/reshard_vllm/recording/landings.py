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
        refused: why a parameter's writes cannot be followed, by parameter.
    """

    landings: list[Landing] = field(default_factory=list)
    constants: dict[str, list[Note]] = field(default_factory=lambda: defaultdict(list))
    programs: dict[str, list[Note]] = field(default_factory=lambda: defaultdict(list))
    stages: list[Stage] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


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
        # Element numbers of all checkpoint tensors; 0 is "no element" (what the loader pads with).
        bases = itertools.accumulate((t.numel() for _, t in sources.values()), initial=1)
        self._first = dict(zip(sources, bases, strict=False))
        self.found = Landings()

    def write(self, at: int, note: Note) -> None:
        """Follow one write of a parameter; what cannot be followed is refused."""
        assert note.written is not None
        key, tensor = self._owner(note)
        try:
            if note.written.dtype != tensor.dtype:
                raise RecordingError(f"written as {note.written.dtype}, it is {tensor.dtype}")
            self._classify(at, key, note, note.written)
        except RecordingError as error:
            self.found.refused.setdefault(key, str(error))

    def _classify(self, at: int, key: str, note: Note, written: Ref) -> None:
        source = note.args[1] if note.name == "copy_" and len(note.args) > 1 else None
        if note.name in ("fill_", "zero_") or (isinstance(source, Ref) and _is_constant(source)):
            if prod(written.view.shape):
                self.found.constants[key].append(note)
            return
        if not isinstance(source, Ref) or self.found.programs.get(key):
            # Once something was computed in place, later writes keep their order.
            self._compute(at, key, note)
        elif source.kind == "source":
            self._move(key, written, source)
        else:
            # What a parameter holds is known from its landings; an intermediate is replayed.
            before = [] if source.kind == "owned" else cone(self._notes[:at], source)
            if self._is_movement(before, source, written):
                self._follow(key, written, source, before)
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

    def _is_movement(self, before: Sequence[Note], source: Ref, written: Ref) -> bool:
        """Whether elements only move, and casts on their way change no bit of the last cast."""
        refs = [source, *(ref for note in before for ref in note.refs())]
        owned = [ref for ref in refs if ref.kind == "owned"]
        if any(self._is_computed(ref) or ref.dtype != written.dtype for ref in owned):
            return False
        origins = {ref.dtype for ref in refs if ref.kind == "source"}
        return all(
            note.name in MOVEMENT and _keeps_bits(note, origins, written.dtype) for note in before
        )

    def _is_computed(self, ref: Ref) -> bool:
        key, _ = self._owned[ref.storage]
        return bool(self.found.programs.get(key)) or key in self.found.refused

    def _follow(self, key: str, written: Ref, source: Ref, before: Sequence[Note]) -> None:
        """Movement that no view expresses: replay it on element numbers."""
        environment = Environment(self._numbers_of)
        for note in before:
            environment.step(numbered(note))
        ids = environment.value(source).broadcast_to(written.view.shape).reshape(-1).numpy()
        if (ids <= 0).any():
            raise RecordingError("the loader mixes padding into moved elements")
        for storage, first in self._first.items():
            name, whole = self._sources[storage]
            inside = (ids >= first) & (ids < first + whole.numel())
            if inside.any():
                own = np.where(inside, ids - first, -1)
                for region, view in align_elements(tuple(whole.shape), own, written.view):
                    piece = Piece(region, key, view)
                    self.found.landings.append(Landing(name, piece, written.dtype))

    def _numbers_of(self, ref: Ref) -> torch.Tensor:
        """Which checkpoint elements a tensor holds."""
        view = ref.view
        if ref.kind == "source":
            first = self._first[ref.storage]
            count = self._sources[ref.storage][1].numel()
            numbers = torch.arange(first, first + count, dtype=torch.int64)
            return numbers.as_strided(view.shape, view.stride, view.offset)
        if ref.kind == "owned":
            return self._landed(ref).as_strided(view.shape, view.stride, view.offset)
        if ref.constant is None:
            raise RecordingError(f"the loader moves {view.shape} elements of unknown origin")
        integral = not ref.dtype.is_floating_point
        return ref.constant if integral else torch.zeros(view.shape, dtype=torch.int64)

    def _landed(self, ref: Ref) -> torch.Tensor:
        """The numbers of what has landed in a parameter so far (ties by copy)."""
        key, tensor = self._owned[ref.storage]
        numbers = torch.zeros(
            tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=torch.int64
        )
        firsts = {self._sources[s][0]: (first, s) for s, first in self._first.items()}
        for landing in self.found.landings:
            if landing.piece.storage == key:
                first, storage = firsts[landing.name]
                whole = self._sources[storage][1]
                inside = torch.arange(first, first + whole.numel()).reshape(whole.shape)
                region, view = landing.piece.region, landing.piece.view
                box = tuple(map(slice, region.offset, region.end))
                numbers.as_strided(view.shape, view.stride, view.offset).copy_(inside[box])
        return numbers

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
            if isinstance(leaf, Ref) and leaf.kind == "owned":
                other, _ = self._owned[leaf.storage]
                if other != key:
                    raise RecordingError(f"the loader computes it from {other}")
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


def _keeps_bits(note: Note, origins: set[torch.dtype], last: torch.dtype) -> bool:
    """Whether a cast on the way loses nothing that the last one would keep."""
    if note.name not in ("copy_", "_to_copy"):
        return True
    given = note.kwargs.get("dtype")
    target = note.written.dtype if note.written is not None else given
    if not isinstance(target, torch.dtype):
        return True
    return target == last or all(
        torch.promote_types(origin, target) == target for origin in origins
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
