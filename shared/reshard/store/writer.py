"""Writing a version: each rank its own shard, then one rank the manifest.

Between the two, all ranks must agree that they have written (`reshard.agreement`): that is the
caller's part. Not here: reading.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save

from reshard.errors import ReshardError
from reshard.ids import FQN
from reshard.layout.boxes import missing
from reshard.layout.holding import RankLayout
from reshard.layout.region import Region
from reshard.store.errors import StoreError, VersionUnsealed
from reshard.store.files import write_whole
from reshard.store.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    ShardRecord,
    StoredPart,
    StoredVersion,
    folder_of,
    record_name,
    shard_name,
)

Read = Callable[[FQN, Region], torch.Tensor]
"""The elements of a region that this rank holds, of the region's shape."""


def write_shard(root: Path, run_id: str, version: int, layout: RankLayout, read: Read) -> None:
    """Write what one rank holds; nothing is gathered.

    Args:
        root: the store's folder, the same for all ranks.
        run_id: of the run.
        version: policy version.
        layout: of this rank.
        read: gives the elements of a region of the layout.

    Raises:
        StoreError: the version is sealed already.
    """
    folder = folder_of(root, version)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        raise StoreError(f"version {version} in {root} is sealed; its bytes never change")
    held = [
        (f"{tensor.name}#{number}", tensor, region)
        for tensor in layout.tensors
        for number, region in enumerate(tensor.regions)
    ]
    values = {key: read(tensor.name, region).contiguous() for key, tensor, region in held}
    first = _first_of_equal_places(values)
    content = save({key: value for key, value in values.items() if first[key] == key})
    starts = _starts(content)
    parts = []
    for key, tensor, region in held:
        start, end = starts[first[key]]
        parts.append(
            StoredPart(
                name=tensor.name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                region=region,
                file=shard_name(layout.rank),
                offset=start,
                blocks=digests(content[start:end]),
            )
        )
    write_whole(folder / shard_name(layout.rank), content)
    record = ShardRecord(run_id, version, tuple(parts))
    write_whole(folder / record_name(layout.rank), msgspec.json.encode(record))


def seal(root: Path, run_id: str, version: int, ranks: int) -> StoredVersion:
    """Write the manifest, once every rank has written its shard.

    Raises:
        VersionUnsealed: shards are missing or another run's, or the parts leave gaps.
    """
    folder = folder_of(root, version)
    faults: list[str] = []
    parts: list[StoredPart] = []
    for rank in range(ranks):
        try:
            raw = (folder / record_name(rank)).read_bytes()
        except FileNotFoundError:
            faults.append(f"rank {rank} has written nothing")
            continue
        try:
            record = msgspec.json.decode(raw, type=ShardRecord)
        except (msgspec.DecodeError, ReshardError) as error:
            faults.append(f"rank {rank}: its record cannot be read: {error}")
            continue
        if record.run_id != run_id:
            faults.append(f"rank {rank} wrote for run {record.run_id}, not {run_id}")
        parts += record.parts
    faults += _gaps(parts)
    if faults:
        raise VersionUnsealed(f"version {version} in {root} cannot be sealed", faults)
    stored = StoredVersion(run_id, version, tuple(parts))
    write_whole(folder / MANIFEST, msgspec.json.encode(stored))
    return stored


def digests(content: bytes | memoryview) -> tuple[str, ...]:
    """BLAKE2b of each block."""
    return tuple(
        hashlib.blake2b(content[at : at + BLOCK_BYTES], digest_size=16).hexdigest()
        for at in range(0, len(content), BLOCK_BYTES)
    )


def _first_of_equal_places(values: dict[str, torch.Tensor]) -> dict[str, str]:
    """By key: the first key with the very same memory. Tied weights are written once."""
    seen: dict[tuple[int, tuple[int, ...], torch.dtype], str] = {}
    return {
        key: seen.setdefault((value.data_ptr(), tuple(value.shape), value.dtype), key)
        if value.numel()
        else key
        for key, value in values.items()
    }


def _gaps(parts: list[StoredPart]) -> list[str]:
    by_name: dict[str, list[StoredPart]] = defaultdict(list)
    for part in parts:
        by_name[part.name].append(part)
    faults = []
    for name, held in sorted(by_name.items()):
        if len({(part.shape, part.dtype) for part in held}) > 1:
            faults.append(f"{name}: ranks disagree on its shape or dtype")
            continue
        gap = missing(Region.whole(held[0].shape), (part.region for part in held))
        if gap:
            faults.append(f"{name}: nobody wrote {', '.join(map(str, gap))}")
    return faults


def _starts(content: bytes) -> dict[str, tuple[int, int]]:
    """First and last byte of each tensor of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    header = msgspec.json.decode(content[8 : 8 + length])
    return {
        key: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for key, entry in header.items()
        if key != "__metadata__"
    }
