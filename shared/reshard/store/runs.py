"""Which bytes of a row-major box hold a part of it.

Coordinate space: byte offsets within the box.
"""

from collections.abc import Iterator
from itertools import product
from math import prod

from reshard.layout.region import Region


def byte_runs(box: Region, part: Region, itemsize: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of each contiguous run, in the row-major order of `part`.

    >>> list(byte_runs(Region((0, 0), (4, 4)), Region((1, 0), (2, 4)), 2))
    [(8, 16)]
    >>> list(byte_runs(Region((0, 0), (4, 4)), Region((1, 2), (2, 2)), 1))
    [(6, 2), (10, 2)]
    """
    if not part.volume:
        return
    inner = part.ndim
    # Dims from `inner` on are taken whole, so they are one run together with the dim before.
    while inner and part.shape[inner - 1] == box.shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)
    strides = [prod(box.shape[dim + 1 :]) for dim in range(box.ndim)]
    local = [a - b for a, b in zip(part.offset, box.offset, strict=True)]
    length = prod(part.shape[outer:]) * itemsize
    tail = sum(local[dim] * strides[dim] for dim in range(outer, box.ndim))
    for place in product(*(range(part.shape[dim]) for dim in range(outer))):
        start = sum((local[dim] + at) * strides[dim] for dim, at in enumerate(place))
        yield (start + tail) * itemsize, length
