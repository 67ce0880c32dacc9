"""From a tape to landings: where each checkpoint element goes.

Coordinate spaces: source regions are global (checkpoint tensors are whole), places are in elements
of a parameter's load-layout storage, or of a staging buffer that feeds a computation.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import cast

import torch
from torch.utils._pytree import tree_map

from reshard.errors import RecordingError
from reshard.ids import FQN
from reshard.layout.align import align, align_elements
from reshard.layout.boxes import union
from reshard.layout.pieces import Piece
from reshard.layout.view import StridedView
from reshard_vllm.recording.landing import (
    Excess,
    Landing,
    Landings,
    Stage,
    slot_of,
    stage_key,
)
from reshard_vllm.recording.narrowing import Narrowed, narrow
from reshard_vllm.recording.numbers import Followed, Sources, cast_once, follow, is_movement
from reshard_vllm.recording.overlaps import Write, last_writes, span
from reshard_vllm.recording.replay import Cones, emptied
from reshard_vllm.recording.settle import settle
from reshard_vllm.recording.tape import Note, Ref, Tape

__all__ = ["Landing", "Landings", "Stage", "resolve"]

Owned = Mapping[int, tuple[str, torch.Tensor]]
"""Parameters and buffers by storage: slot key, and one tensor of that storage."""


def resolve(tape: Tape, sources: Sources, owned: Owned) -> Landings:
    """Follow every write of a parameter back to the checkpoint.

    Args:
        tape: what the loader did.
        sources: checkpoint tensors by storage.
        owned: parameters and buffers as they are when the loader is done, by storage: key and one
            tensor of that storage.

    Returns:
        the landings; what cannot be followed is refused in them, by parameter.

    Raises:
        RecordingError: the loader writes storage that is no parameter's.
    """
    notes, adopted = settle(tape, owned.keys())
    owned = {**owned, **{fake: owned[storage] for fake, storage in adopted.items()}}
    resolver = _Resolver(notes, sources, owned)
    writes: dict[str, list[int]] = defaultdict(list)
    for at, note in enumerate(notes):
        written = note.written
        if written is not None and written.kind == "owned" and 0 not in written.view.shape:
            writes[owned[written.storage][0]].append(at)
    for key, several in writes.items():
        try:
            resolver.parameter(key, several)
        except RecordingError as error:
            resolver.found.refused[key] = str(error)
    return resolver.found


@dataclass(frozen=True, slots=True)
class _Step:
    """One write of a parameter.

    Attributes:
        at: number of its note.
        cone: numbers of the notes that it depends on, in order.
        notes: these notes, made to stand alone.
        written: what it writes.
        value: what it writes there; None for one that does not simply overwrite.
    """

    at: int
    cone: tuple[int, ...]
    notes: tuple[Note, ...]
    written: Ref
    value: object


class _Resolver:
    def __init__(self, notes: Sequence[Note], sources: Sources, owned: Owned) -> None:
        self._notes = notes
        self._sources = sources
        self._owned = owned
        self._storages: dict[str, set[int]] = defaultdict(set)
        for storage, (key, _) in owned.items():
            self._storages[key].add(storage)
        self._cones = Cones(notes)
        self.found = Landings()

    def parameter(self, key: str, several: Sequence[int]) -> None:
        """Classify all writes of one parameter, given in order.

        Raises:
            RecordingError: one of them cannot be followed.
        """
        steps = [self._step(key, at) for at in several]
        start = self._computed_from(steps)
        moved = [self._moved(key, step) for step in steps if step.at < start]
        self.found.landings += last_writes(moved)
        program = [step for step in steps if step.at >= start]
        notes = sorted({at for step in program for at in (*step.cone, step.at)})
        if notes:
            self._refuse_unwritten([write.view for write in moved], notes)
            self._compute(key, notes)

    def _step(self, key: str, at: int) -> _Step:
        note = self._notes[at]
        assert note.written is not None
        dtype = self._owned[note.written.storage][1].dtype
        if note.written.dtype != dtype:
            raise RecordingError(f"written as {note.written.dtype}, it is {dtype}")
        value = None
        if note.name in ("copy_", "fill_"):
            value = note.args[1]
        elif note.name == "zero_":
            value = 0.0
        cone = self._cones.before(at, self._storages[key])
        alone = self._standing_alone(key, [*(self._notes[n] for n in cone), note])
        for step in alone:
            _refuse_unknown(step)
        if isinstance(value, Ref):
            value = alone[-1].args[1]
        return _Step(at, cone, tuple(alone[:-1]), note.written, value)

    def _standing_alone(self, key: str, notes: Sequence[Note]) -> list[Note]:
        """Other parameters that are read are intermediates, and hold nothing at first."""
        others = {
            ref.storage: ref
            for note in notes
            for ref in note.refs()
            if ref.kind == "owned" and ref.storage not in self._storages[key]
        }
        if not others:
            return list(notes)

        def apart(leaf: object) -> object:
            other = isinstance(leaf, Ref) and leaf.storage in others
            return replace(leaf, kind="temporary") if other else leaf  # type: ignore[type-var]

        empty = [emptied(storage, self._owned[storage][1]) for storage in others]
        return empty + [
            Note(
                note.operation,
                tree_map(apart, note.args),
                tree_map(apart, dict(note.kwargs)),
                cast("Ref | None", apart(note.written)),
                note.made,
            )
            for note in notes
        ]

    def _computed_from(self, steps: Sequence[_Step]) -> int:
        """Number of the note from which the writes are a program.

        That is the first that computes, or whose result one that computes reads: once something
        was computed, what follows keeps its order.
        """
        computing = [step.at for step in steps if not self._is_movement(step)]
        if not computing:
            return len(self._notes)
        later = [at for step in steps if step.at >= computing[0] for at in (*step.cone, step.at)]
        return min([computing[0], *(at for at in later if self._read(at))])

    def _read(self, at: int) -> list[Ref]:
        """Parameters that a note reads; a plain overwrite does not read what it writes."""
        note = self._notes[at]
        overwrites = note.name in ("copy_", "fill_", "zero_")
        refs = Note(note.operation, note.args[1:] if overwrites else note.args, note.kwargs).refs()
        return [ref for ref in refs if ref.kind == "owned"]

    def _is_movement(self, step: _Step) -> bool:
        if not isinstance(step.value, Ref):
            return step.value is not None
        if step.value.kind != "temporary":
            return step.value.kind != "owned"
        last = Note(torch.ops.aten.copy_.default, (step.value,), {})
        return is_movement([*step.notes, last], self._sources) and cast_once(
            step.notes, step.value, step.written.dtype
        )

    def _moved(self, key: str, step: _Step) -> Write:
        """Landings and constants of a write that computes nothing."""
        value = step.value
        if isinstance(value, Ref) and value.kind == "source":
            return self._place_source(key, step.written, value)
        if isinstance(value, Ref) and value.kind == "temporary":
            return self._place_elements(key, step.written, value, step.notes)
        self.found.constants[key].append(self._notes[step.at])
        return Write(step.written.view, (), ())

    def _place_source(self, key: str, written: Ref, source: Ref) -> Write:
        name, whole = self._whole(source)
        shape = tuple(whole.shape)
        view = _broadcast(source.view, written.view.shape)
        pieces = [Piece(r, key, local) for r, local in align(shape, view, written.view)]
        landings = tuple(Landing(name, piece, written.dtype) for piece in pieces)
        return Write(written.view, landings, (shape,) * len(landings))

    def _place_elements(self, key: str, written: Ref, value: Ref, notes: Sequence[Note]) -> Write:
        followed = follow(notes, value, written, self._sources)
        self.found.constants[key] += _filled(written, followed)
        landings: list[Landing] = []
        shapes: list[tuple[int, ...]] = []
        for name, shape, elements in followed.elements:
            for region, view in align_elements(shape, elements, written.view):
                landings.append(Landing(name, Piece(region, key, view), written.dtype))
                shapes.append(shape)
        return Write(written.view, tuple(landings), tuple(shapes))

    def _refuse_unwritten(self, moved: Sequence[StridedView], steps: Sequence[int]) -> None:
        """What a constructor left in a parameter is not there when a program is replayed."""
        reads = {at: [ref.view for ref in self._read(at)] for at in steps}
        written = {
            at: w.view for at in steps if (w := self._notes[at].written) and w.kind == "owned"
        }
        every = [
            *moved,
            *written.values(),
            *(view for several in reads.values() for view in several),
        ]
        marks = torch.zeros(max((span(view)[1] for view in every), default=0), dtype=torch.bool)

        def at_view(view: StridedView) -> torch.Tensor:
            return marks.as_strided(view.shape, view.stride, view.offset)

        for view in moved:
            at_view(view).fill_(True)
        for at in steps:
            if not all(at_view(view).all() for view in reads[at]):
                raise RecordingError("the loader computes with elements that it never loaded")
            if at in written:
                at_view(written[at]).fill_(True)

    def _compute(self, key: str, steps: Sequence[int]) -> None:
        """Keep the arithmetic; stage exactly the checkpoint elements that it reads."""
        staged: dict[tuple[int, StridedView], Ref] = {}

        def stage(leaf: object) -> object:
            if not isinstance(leaf, Ref) or leaf.kind != "source":
                return leaf
            place = (leaf.storage, leaf.view)
            if place not in staged:
                staged[place] = self._stage(stage_key(key, len(staged)), leaf)
            return staged[place]

        narrowed = narrow([self._notes[at] for at in steps])
        for note in narrowed.notes:
            for ref in note.refs():
                if ref.kind == "owned" and ref.storage not in self._storages[key]:
                    raise RecordingError(
                        f"the loader computes it from {self._owned[ref.storage][0]}"
                    )
            args, kwargs = tree_map(stage, note.args), tree_map(stage, dict(note.kwargs))
            self.found.programs[key].append(replace(note, args=args, kwargs=kwargs))
        self._note_excess(key, narrowed)

    def _note_excess(self, key: str, narrowed: Narrowed) -> None:
        """What a program reads whole, for want of a way to cut it down."""
        written = {
            n.written.view for n in narrowed.notes if n.written and n.written.kind == "owned"
        }
        kept = sum(prod(view.shape) for view in written)
        stages = {stage.key for stage in self.found.stages if slot_of(stage.key) == key}
        names, operations, nbytes = [], set[str](), 0
        for storage, mixing in narrowed.mixing.items():
            name, whole = self._sources[storage]
            staged = union(
                landing.piece.region
                for landing in self.found.landings
                if landing.name == name and landing.piece.storage in stages
            )
            more = (sum(region.volume for region in staged) - kept) * whole.element_size()
            if more > 0:
                names.append(name)
                operations |= mixing
                nbytes += more
        if names:
            self.found.excess[key] = Excess(tuple(names), tuple(sorted(operations)), nbytes)

    def _stage(self, buffer: str, source: Ref) -> Ref:
        name, whole = self._whole(source)
        contiguous = StridedView.contiguous(source.view.shape)
        for region, view in align(tuple(whole.shape), source.view, contiguous):
            self.found.landings.append(Landing(name, Piece(region, buffer, view), source.dtype))
        self.found.stages.append(Stage(buffer, source.view.shape, source.dtype))
        return Ref("constant", len(self.found.stages) - 1, contiguous, source.dtype)

    def _whole(self, source: Ref) -> tuple[FQN, torch.Tensor]:
        name, whole = self._sources[source.storage]
        if source.dtype != whole.dtype:
            raise RecordingError(f"the loader reads {name}, {whole.dtype}, as {source.dtype}")
        return name, whole


def _refuse_unknown(note: Note) -> None:
    for ref in note.refs():
        if ref.constant is not None and ref.constant.is_meta:
            raise RecordingError(f"the loader reads {ref.view.shape} elements of unknown origin")


def _filled(written: Ref, followed: Followed) -> list[Note]:
    """The constants of one write, as writes of their own."""
    shape = written.view.shape
    notes = []
    for region, view in align_elements(shape, followed.constants, written.view):
        values = followed.values[tuple(map(slice, region.offset, region.end))].clone()
        place = replace(written, view=view)
        constant = Ref("constant", 0, StridedView.contiguous(region.shape), written.dtype, values)
        notes.append(Note(torch.ops.aten.copy_.default, (place, constant), {}, place))
    return notes


def _broadcast(view: StridedView, shape: tuple[int, ...]) -> StridedView:
    """The source view as `copy_` sees it: leading and extent-1 dims expanded."""
    if view.shape == shape:
        return view
    missing = len(shape) - len(view.shape)
    if missing < 0:
        # Leading dims of extent 1 that `copy_` drops.
        return _broadcast(StridedView(view.offset, view.shape[1:], view.stride[1:]), shape)
    extents = (1,) * missing + view.shape
    strides = (0,) * missing + view.stride
    expanded = tuple(
        0 if extent == 1 and wanted != 1 else step
        for extent, wanted, step in zip(extents, shape, strides, strict=True)
    )
    if prod(shape) and any(e not in (1, w) for e, w in zip(extents, shape, strict=True)):
        raise RecordingError(f"a view of {view.shape} is copied into one of {shape}")
    return StridedView(view.offset, shape, expanded)
