"""Only what a rank keeps: a program cut down to the elements that end in its parameter.

A loader may compute on a whole checkpoint tensor and slice afterwards; every rank would then stage
the whole. Walking backwards, what is read of an intermediate says which boxes of it are needed;
element by element operations, and joins, are repeated on these boxes alone. What mixes elements
(a norm, a sum, a permutation by index) keeps its operands whole.

Coordinate space: boxes are in elements of the view that an operation makes.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch.utils._pytree import tree_map

from reshard.errors import LayoutError
from reshard.layout.align import align
from reshard.layout.boxes import union
from reshard.layout.region import Region
from reshard.layout.view import StridedView
from reshard_vllm.recording.tape import Note, Ref

_PLAIN: Final = frozenset({"clone", "_to_copy", "copy_", "fill_", "zero_"})
"""Element by element, without the tag that says so."""

_MANY: Final = 64
"""Boxes of one intermediate; with more, it is taken whole."""


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A program that computes what is kept.

    Attributes:
        notes: in order; an intermediate may be made part by part.
        mixing: operations that read checkpoint elements without being cut down, by storage of the
            checkpoint tensor.
    """

    notes: tuple[Note, ...]
    mixing: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))


def narrow(notes: Sequence[Note]) -> Narrowed:
    """Cut a program down.

    Args:
        notes: the writes of one parameter, and all that they depend on, in order.
    """
    needs = _Needs(notes)
    kept: list[Note] = []
    found = Narrowed(())
    for note in reversed(notes):
        parts = list(_parts(note, needs))
        for part in parts:
            needs.read(part)
            if not _by_element(part):
                for ref in part.refs():
                    if ref.kind == "source":
                        found.mixing[ref.storage].add(part.name)
        kept += reversed(parts)
    return replace(found, notes=tuple(reversed(kept)))


class _Needs:
    """What later operations read of each intermediate."""

    def __init__(self, notes: Sequence[Note]) -> None:
        self._made = {ref.storage: ref for note in notes for ref in note.made if ref is not None}
        self._several = {
            ref.storage
            for note in notes
            if note.written is not None
            for ref in (note.written,)
            if ref.kind == "temporary" and ref != self._made.get(ref.storage)
        }
        self._views: dict[int, set[StridedView]] = defaultdict(set)
        self._whole: set[int] = set()

    def read(self, note: Note) -> None:
        """Note what an operation reads; what it writes in place it may read, too."""
        for ref in note.refs():
            if ref.kind != "temporary":
                continue
            made = self._made.get(ref.storage)
            if made is None or ref.dtype != made.dtype:
                self._whole.add(ref.storage)
            self._views[ref.storage].add(ref.view)

    def unread(self, storage: int) -> bool:
        """Whether nothing later reads any of it."""
        return not self._views[storage]

    def boxes(self, out: Ref) -> tuple[Region, ...] | None:
        """The boxes of `out` that are read; None where it has to be made whole."""
        made = self._made.get(out.storage)
        # An intermediate that is filled part by part is not followed.
        if made is None or out.view != made.view or out.storage in {*self._whole, *self._several}:
            return None
        order = _row_major(made.view)
        if order is None:
            return None
        sorted_shape = tuple(made.view.shape[dim] for dim in order)
        try:
            regions = [
                region
                for view in self._views[out.storage]
                for region, _ in align(
                    sorted_shape,
                    StridedView(view.offset - made.view.offset, view.shape, view.stride),
                    StridedView.contiguous(view.shape),
                )
            ]
        except LayoutError:
            return None
        back = sorted(range(len(order)), key=order.__getitem__)
        boxes = union(
            Region(tuple(r.offset[d] for d in back), tuple(r.shape[d] for d in back))
            for r in regions
        )
        if len(boxes) > _MANY or boxes == (Region.whole(made.view.shape),):
            return None
        return boxes


def _row_major(view: StridedView) -> tuple[int, ...] | None:
    """The order of dims in which the view is contiguous; None if there is none."""
    order = tuple(sorted(range(len(view.shape)), key=lambda d: -view.stride[d]))
    sorted_shape = tuple(view.shape[d] for d in order)
    wanted = StridedView.contiguous(sorted_shape).stride
    fits = all(
        view.stride[d] == step or view.shape[d] == 1 for d, step in zip(order, wanted, strict=True)
    )
    return order if fits else None


def _parts(note: Note, needs: _Needs) -> Iterator[Note]:
    """The note as far as it is needed: whole, box by box, or not at all."""
    outs = [ref for ref in (note.written, *note.made) if ref is not None]
    if all(out.kind == "temporary" and needs.unread(out.storage) for out in outs):
        return
    boxes = needs.boxes(outs[0]) if len(outs) == 1 and outs[0].kind == "temporary" else None
    if boxes is None:
        yield note
    elif note.name == "cat" and note.written is None:
        for box in boxes:
            yield from _joined(note, outs[0], box)
    elif _by_element(note):
        for box in boxes:
            yield _within(note, outs[0], box)
    else:
        yield note


def _by_element(note: Note) -> bool:
    """Whether each element of the result depends on the elements at its place alone."""
    outs = [ref for ref in (note.written, *note.made) if ref is not None]
    if len(outs) != 1 or not (torch.Tag.pointwise in note.operation.tags or note.name in _PLAIN):
        return False
    return all(_reaches(ref.view.shape, outs[0].view.shape) for ref in note.refs())


def _reaches(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    tail = wanted[len(wanted) - len(shape) :]
    return len(shape) <= len(wanted) and all(n in (1, w) for n, w in zip(shape, tail, strict=True))


def _within(note: Note, out: Ref, box: Region) -> Note:
    def cut(leaf: object) -> object:
        return _cut(leaf, box, out.view.shape) if isinstance(leaf, Ref) else leaf

    written = None if note.written is None else _cut(note.written, box, out.view.shape)
    made = tuple(None if ref is None else _cut(ref, box, out.view.shape) for ref in note.made)
    args, kwargs = tree_map(cut, note.args), tree_map(cut, dict(note.kwargs))
    return Note(note.operation, args, kwargs, written, made)


def _joined(note: Note, out: Ref, box: Region) -> Iterator[Note]:
    """The parts of a box that come from each operand of a join."""
    tensors = note.args[0]
    assert isinstance(tensors, list | tuple)
    along = note.args[1] if len(note.args) > 1 else note.kwargs.get("dim", 0)
    assert isinstance(along, int)
    dim = along % len(out.view.shape)
    start = 0
    for ref in tensors:
        assert isinstance(ref, Ref)
        if ref.view.shape == (0,):
            continue  # joins with anything, and adds nothing
        offset = tuple(start if d == dim else 0 for d in range(len(out.view.shape)))
        start += ref.view.shape[dim]
        part = box.intersect(Region(offset, ref.view.shape))
        if part is not None:
            inside = part.translate(tuple(-o for o in offset))
            yield Note(
                torch.ops.aten.clone.default,
                (_cut(ref, inside, ref.view.shape),),
                {},
                None,
                (_cut(out, part, out.view.shape),),
            )


def _cut(ref: Ref, box: Region, shape: tuple[int, ...]) -> Ref:
    """The part of an operand, broadcast to `shape`, that meets `box`."""
    missing = len(shape) - len(ref.view.shape)
    spans = [
        (0, 1) if extent == 1 else (start, length)
        for extent, start, length in zip(
            ref.view.shape, box.offset[missing:], box.shape[missing:], strict=True
        )
    ]
    offset = ref.view.offset + sum(
        start * step for (start, _), step in zip(spans, ref.view.stride, strict=True)
    )
    view = StridedView(offset, tuple(length for _, length in spans), ref.view.stride)
    if ref.constant is None:
        return replace(ref, view=view)
    slices = tuple(slice(start, start + length) for start, length in spans)
    return replace(ref, view=view, constant=ref.constant[slices])
