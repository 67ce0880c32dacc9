"""Several writes to one element: the loader's last one counts.

A loader may fill a parameter and then zero a row of it, or be given two names for one storage. What
arrives in a refit has no order, so every element must be written by one landing alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from reshard.layout.align import align_elements
from reshard.layout.pieces import Piece
from reshard.layout.view import StridedView
from reshard_vllm.recording.landing import Landing


@dataclass(frozen=True, slots=True)
class Write:
    """One write of a parameter.

    Attributes:
        view: of its storage, all that is written.
        landings: the checkpoint elements among it; the rest are constants.
        shapes: of the landings' checkpoint tensors.
    """

    view: StridedView
    landings: tuple[Landing, ...]
    shapes: tuple[tuple[int, ...], ...]


def last_writes(writes: Sequence[Write]) -> list[Landing]:
    """The landings of `writes` (in order), each cut to the elements that no later write reaches."""
    if not _may_overlap(writes):
        return [landing for write in writes for landing in write.landings]
    writer = np.full(max(span(w.view)[1] for w in writes), -1, dtype=np.int32)
    for at, write in enumerate(writes):
        writer[_places(write.view)] = at
    kept: list[Landing] = []
    for at, write in enumerate(writes):
        for landing, shape in zip(write.landings, write.shapes, strict=True):
            kept += _cut(landing, shape, writer[_places(landing.piece.view)] == at)
    return kept


def _cut(landing: Landing, shape: tuple[int, ...], alive: npt.NDArray[np.bool_]) -> list[Landing]:
    if alive.all():
        return [landing]
    if not alive.any():
        return []
    piece = landing.piece
    contiguous = StridedView.contiguous(shape)
    first = sum(o * s for o, s in zip(piece.region.offset, contiguous.stride, strict=True))
    numbers = _places(StridedView(first, piece.region.shape, contiguous.stride))
    boxes = align_elements(shape, np.where(alive, numbers, -1), piece.view)
    return [replace(landing, piece=Piece(region, piece.storage, view)) for region, view in boxes]


def _may_overlap(writes: Sequence[Write]) -> bool:
    """Whether two writes reach the same element."""
    spans = sorted(span(w.view) for w in writes if prod(w.view.shape))
    if all(end <= start for (_, end), (start, _) in pairwise(spans)):
        return False
    # Interleaved (shards of columns): no overlap if as many places are marked as are written.
    marks = torch.zeros(max(end for _, end in spans), dtype=torch.bool)
    for write in writes:
        view = write.view
        marks.as_strided(view.shape, view.stride, view.offset).fill_(True)
    return int(marks.sum()) < sum(prod(w.view.shape) for w in writes)


def span(view: StridedView) -> tuple[int, int]:
    """First element of a view, and the one after its last, in elements of the storage."""
    if 0 in view.shape:
        return view.offset, view.offset
    last = sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True))
    return view.offset, view.offset + last + 1


def _places(view: StridedView) -> npt.NDArray[np.int64]:
    places = np.array(view.offset, dtype=np.int64)
    for n, step in zip(view.shape, view.stride, strict=True):
        places = places[..., None] + np.arange(n, dtype=np.int64) * step
    return places.reshape(-1)
