"""Reading a sealed version: only the bytes of the regions that are asked for, each verified.

Digests are of blocks, so what is read is rounded out to blocks (64 KiB). Not here: installing.
"""

import hashlib
import os
from collections import defaultdict
from pathlib import Path

import msgspec
import torch

from reshard.dtypes import itemsize
from reshard.errors import ReshardError
from reshard.ids import FQN
from reshard.layout.boxes import missing, subtract
from reshard.layout.region import Region
from reshard.store.errors import StoreError, VersionDamaged, VersionGone, VersionUnsealed
from reshard.store.manifest import BLOCK_BYTES, MANIFEST, StoredPart, StoredVersion, folder_of
from reshard.store.runs import byte_runs


class StoreReader:
    """One sealed version.

    Attributes:
        stored: its manifest.
        bytes_read: from weight files, so far.
    """

    def __init__(self, root: Path, version: int, *, run_id: str = "") -> None:
        """Open a version.

        Args:
            root: the store's folder.
            version: policy version.
            run_id: the run that must have written it; empty: any.

        Raises:
            VersionGone: there is none, or it was retired.
            VersionUnsealed: it is half written.
            VersionDamaged: its manifest cannot be read.
            StoreError: another run wrote it.
        """
        self._folder = folder_of(root, version)
        self._what = f"version {version} in {root}"
        self.stored = self._manifest()
        self.bytes_read = 0
        if self.stored.version != version:
            raise VersionDamaged(f"{self._what} says that it is version {self.stored.version}")
        if run_id and self.stored.run_id != run_id:
            raise StoreError(f"{self._what} is of run {self.stored.run_id}, not {run_id}")
        self._parts: dict[str, list[StoredPart]] = defaultdict(list)
        for part in self.stored.parts:
            self._parts[part.name].append(part)

    def read(self, name: FQN, region: Region) -> torch.Tensor:
        """The elements of a region, of its shape.

        Raises:
            StoreError: no such tensor, or not all of the region.
            VersionDamaged: bytes that are not the ones that were written.
            VersionGone: it was retired meanwhile.
        """
        parts = self._parts.get(name)
        if not parts:
            raise StoreError(f"{self._what} holds no tensor {name}")
        gap = missing(region, (part.region for part in parts))
        if gap:
            raise StoreError(f"{self._what}: {name} has no {', '.join(map(str, gap))}")
        out = torch.empty(region.shape, dtype=getattr(torch, parts[0].dtype))
        left = [region] if region.volume else []
        for part in parts:
            rest: list[Region] = []
            for box in left:
                common = box.intersect(part.region)
                if common is not None:
                    self._copy(part, common, region, out)
                rest += subtract(box, part.region)
            left = rest
        return out

    def _manifest(self) -> StoredVersion:
        try:
            raw = (self._folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            if any(self._folder.glob("rank-*")):
                raise VersionUnsealed(
                    f"{self._what} is half written: it has shards, but no manifest"
                ) from None
            raise VersionGone(f"{self._what} is not there, or was retired") from None
        try:
            return msgspec.json.decode(raw, type=StoredVersion)
        except (msgspec.DecodeError, ReshardError) as error:
            raise VersionDamaged(f"{self._what}: its manifest cannot be read: {error}") from error

    def _copy(self, part: StoredPart, common: Region, region: Region, out: torch.Tensor) -> None:
        size = itemsize(part.dtype)
        runs = list(byte_runs(part.region, common, size))
        blocks = self._blocks(part, runs, size)
        packed = bytearray()
        for offset, length in runs:
            packed += _cut(blocks, offset, length)
        values = torch.frombuffer(packed, dtype=out.dtype).reshape(common.shape)
        place = tuple(
            slice(o - base, o - base + n)
            for o, base, n in zip(common.offset, region.offset, common.shape, strict=True)
        )
        out[place] = values

    def _blocks(self, part: StoredPart, runs: list[tuple[int, int]], size: int) -> dict[int, bytes]:
        """The blocks that hold these runs, by number, verified."""
        nbytes = part.region.volume * size
        wanted = {
            number
            for offset, length in runs
            for number in range(offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES))
        }
        blocks: dict[int, bytes] = {}
        try:
            descriptor = os.open(self._folder / part.file, os.O_RDONLY)
        except FileNotFoundError:
            raise VersionGone(f"{self._what} was retired while it was read") from None
        try:
            for number in sorted(wanted):
                start = number * BLOCK_BYTES
                length = min(BLOCK_BYTES, nbytes - start)
                block = os.pread(descriptor, length, part.offset + start)
                self.bytes_read += len(block)
                if hashlib.blake2b(block, digest_size=16).hexdigest() != part.blocks[number]:
                    raise VersionDamaged(
                        f"{self._what}: {part.name} {part.region} in {part.file} is not what was "
                        f"written (block {number}, {len(block)} of {length} bytes)"
                    )
                blocks[number] = block
        finally:
            os.close(descriptor)
        return blocks


def _cut(blocks: dict[int, bytes], offset: int, length: int) -> bytes:
    """Bytes `[offset, offset + length)` of the part that the blocks are of."""
    first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
    joined = b"".join(blocks[number] for number in range(first, last + 1))
    start = offset - first * BLOCK_BYTES
    return joined[start : start + length]
