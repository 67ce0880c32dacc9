"""A digest of weights that does not depend on how they are sharded.

Each element contributes its bits times a weight that depends on the tensor's name and on the
element's global position; contributions add up modulo 2**64. So parts add: the digests of disjoint
regions sum to the digest of their union, under any sharding. The weight of position `(i, j, ...)`
is `r0[i] * r1[j] * ...` with pseudo-random odd 64-bit numbers, a multilinear hash: over the choice
of the keys, two different tensors of 16-bit elements collide with probability of about
`ndim / 2**47` (fewer bits remain where all differing elements differ by a multiple of a large power
of two).

It guards against mistakes (swapped, shifted, stale, missing elements), not against forgery: the
keys follow from the name alone.

Coordinate space: global regions. Not here: when digests are compared.
"""

import hashlib
from functools import lru_cache
from typing import Final

import torch

from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard.layout.region import Region

_MASK: Final = 2**64 - 1
_STEP: Final = 0x9E3779B97F4A7C15
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS_BYTES: Final = 2**20
"""Elements are widened in runs of about this many bytes, to stay in the cache."""


def digest_region(name: FQN, region: Region, values: torch.Tensor) -> int:
    """The digest of `values`, which are the elements of `region` of the tensor `name`.

    The dtype counts: the same numbers in another dtype are other bits.

    Args:
        name: canonical name.
        region: global region, in elements.
        values: `region.shape`, any strides.

    Returns:
        An integer in `[0, 2**64)`; 0 for an empty region.

    Raises:
        LayoutError: `values` is not of the region's shape.
    """
    if tuple(values.shape) != region.shape:
        raise LayoutError(f"{name}: values {tuple(values.shape)} for a region of {region.shape}")
    if not region.volume:
        return 0
    if values.dtype == torch.bool:
        values = values.view(torch.uint8)
    if not region.ndim:
        values, region = values.reshape(1), Region((0,), (1,))
    seed = _seed(name, str(values.dtype))
    keys = [
        _keys(seed, dim, offset, extent, values.device)
        for dim, (offset, extent) in enumerate(zip(region.offset, region.shape, strict=True))
    ]
    contracted = _contract_last(values.detach(), keys[-1])
    for key in reversed(keys[:-1]):
        contracted = (contracted * key).sum(-1)
    return int(contracted) & _MASK


def add(*digests: int) -> int:
    """The digest of the union of disjoint parts.

    >>> add(2**64 - 1, 2)
    1
    """
    return sum(digests) & _MASK


def _contract_last(values: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """`sum(bits * key)` over the last dim, as int64 of shape `values.shape[:-1]`."""
    bits = values.view(_BITS[values.element_size()])
    if bits.ndim == 1:
        return (bits.to(torch.int64) * key).sum()
    rows = bits.reshape(-1, bits.shape[-1])
    out = torch.empty(rows.shape[0], dtype=torch.int64, device=values.device)
    step = max(1, _ROWS_BYTES // (8 * rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step].to(torch.int64, copy=True)
        torch.sum(part.mul_(key), dim=-1, out=out[start : start + step])
    return out.reshape(bits.shape[:-1])


def _seed(name: str, dtype: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{name}\0{dtype}".encode(), digest_size=8).digest())


@lru_cache(maxsize=512)
def _keys(seed: int, dim: int, offset: int, extent: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random int64 `[extent]` for positions `offset ..` of one dim (splitmix64)."""
    start = (seed + (dim + 1) * 0xD1342543DE82EF95) & _MASK
    x = torch.arange(offset + 1, offset + extent + 1, dtype=torch.int64, device=device)
    x = x * _signed(_STEP) + _signed(start)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift(x, 31)) | 1


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of the uint64 `x`."""
    x &= _MASK
    return x - 2**64 if x >= 2**63 else x
