"""Casts of scattered elements on CPUs, through a scratch buffer that stays in the cache.

torch casts a contiguous row at the speed of memory, but short rows of a wider tensor two to four
times slower, and transposed ones slower still. Here such a copy is cut into chunks; each is
compacted in the source's dtype and order of memory, then cast, then put in its place. The values
are those of one `copy_`.
"""

import threading
from collections.abc import Iterator
from math import prod

import torch

CHUNK_ELEMENTS = 2**18
"""Elements of one chunk: 1 MiB of fp32."""

SCRATCH_BYTES = 2 * 8 * CHUNK_ELEMENTS
"""Most scratch memory of one thread: two buffers of the widest dtype."""

_SHORT_RUN = 4096
LEAST_ELEMENTS = 2**16
"""Fewer are cast as they are, without scratch memory."""

_scratch = threading.local()


def is_scattered(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `cast_in_chunks` is worth its while."""
    if source.dtype == destination.dtype or source.device.type != "cpu":
        return False
    if destination.device.type != "cpu" or source.numel() < LEAST_ELEMENTS:
        return False
    return _run(source) < _SHORT_RUN or _run(destination) < min(_SHORT_RUN, destination.shape[-1])


def cast_in_chunks(destination: torch.Tensor, source: torch.Tensor) -> None:
    """`destination.copy_(source)`, for views of equal shape."""
    order = sorted(range(source.ndim), key=lambda dim: -source.stride()[dim])
    for target, piece in chunks(destination.permute(order), source.permute(order)):
        if not piece.is_contiguous():
            piece = _buffer("source", piece).copy_(piece)
        if target.stride()[-1] == 1:
            target.copy_(piece)
        else:
            target.copy_(_buffer("cast", target).copy_(piece))


def _run(view: torch.Tensor) -> int:
    """Elements that follow each other in memory, in the view's own order."""
    run = 1
    for extent, stride in zip(reversed(view.shape), reversed(view.stride()), strict=True):
        if extent != 1 and stride != run:
            break
        run *= extent
    return run


def chunks(
    destination: torch.Tensor, source: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two views of equal shape in pieces of at most `CHUNK_ELEMENTS`."""
    if source.numel() <= CHUNK_ELEMENTS:
        yield destination, source
        return
    dim = next(d for d, extent in enumerate(source.shape) if extent > 1)
    rows = max(1, CHUNK_ELEMENTS // max(1, prod(source.shape[dim + 1 :])))
    pairs = zip(torch.split(destination, rows, dim), torch.split(source, rows, dim), strict=True)
    for target, piece in pairs:
        yield from chunks(target, piece)


def _buffer(role: str, like: torch.Tensor) -> torch.Tensor:
    """This thread's scratch memory of that role, with the shape and dtype of `like`."""
    raw: torch.Tensor | None = getattr(_scratch, role, None)
    if raw is None:
        raw = torch.zeros(SCRATCH_BYTES // 2, dtype=torch.uint8)
        setattr(_scratch, role, raw)
    nbytes = like.numel() * like.element_size()
    return raw[:nbytes].view(like.dtype).view(like.shape)
