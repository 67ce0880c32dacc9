"""Sealed versions in a directory: written shard by shard, read region by region, no gather."""

from reshard.store.errors import StoreError, VersionDamaged, VersionGone, VersionUnsealed
from reshard.store.manifest import StoredPart, StoredVersion
from reshard.store.reader import StoreReader
from reshard.store.retire import retire
from reshard.store.writer import seal, write_shard

__all__ = [
    "StoreError",
    "StoreReader",
    "StoredPart",
    "StoredVersion",
    "VersionDamaged",
    "VersionGone",
    "VersionUnsealed",
    "retire",
    "seal",
    "write_shard",
]
