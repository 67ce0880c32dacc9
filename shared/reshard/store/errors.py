"""What can be wrong with a stored version; part of the one tree in `reshard.errors`."""

from reshard.errors import ReshardError


class StoreError(ReshardError):
    """A version that cannot be written or read."""


class VersionUnsealed(StoreError):
    """Half written: shards without a manifest, or a manifest that cannot be made yet."""


class VersionDamaged(StoreError):
    """Its bytes are not the ones that were written."""


class VersionGone(StoreError):
    """There is no such version, or it was retired."""
