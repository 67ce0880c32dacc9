"""What a stored version consists of, and how its files are called.

A version is a folder `v<version>` with one safetensors file and one record a trainer rank; the
manifest comes last, so a folder without one is half written.
"""

from pathlib import Path
from typing import Final

import msgspec

from reshard.dtypes import DType
from reshard.layout.region import Region

MANIFEST: Final = "manifest.json"
BLOCK_BYTES: Final = 64 * 2**10
"""Digests are of blocks of this many bytes of a part: what a reader reads at least."""


class StoredPart(msgspec.Struct, frozen=True):
    """One region of one tensor, row-major, in one file.

    Attributes:
        name: canonical name.
        shape: of the whole tensor, in elements.
        dtype: as stored.
        region: global, in elements.
        file: within the version's folder.
        offset: of the first byte in the file.
        blocks: BLAKE2b of each block of `BLOCK_BYTES` bytes of the part, in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    region: Region
    file: str
    offset: int
    blocks: tuple[str, ...]


class ShardRecord(msgspec.Struct, frozen=True):
    """What one rank wrote."""

    run_id: str
    version: int
    parts: tuple[StoredPart, ...]


class StoredVersion(msgspec.Struct, frozen=True):
    """A sealed version: the parts of all ranks, which cover every tensor."""

    run_id: str
    version: int
    parts: tuple[StoredPart, ...]


def folder_of(root: Path, version: int) -> Path:
    """Where a version lies.

    >>> folder_of(Path("store"), 7).name
    'v000000000007'
    """
    return root / f"v{version:012d}"


def shard_name(rank: int) -> str:
    """The file of one rank's weights."""
    return f"rank-{rank:05d}.safetensors"


def record_name(rank: int) -> str:
    """The file that says what one rank wrote."""
    return f"rank-{rank:05d}.json"
