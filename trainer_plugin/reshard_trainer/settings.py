"""How a trainer publishes: decided on trainer rank 0, the same on all ranks."""

from typing import Literal

import msgspec

from reshard.board.addresses import interfaces
from reshard.errors import ReshardError
from reshard.session import Install, Share, StoredAt, Transport, Verify
from reshard.transport.bounds import LEAST_BUFFER_BYTES

PrefixCache = Literal["reset", "keep"]
OnFailure = Literal["raise", "continue"]
Replicas = Literal["first", "always", "never"]
BusyEngines = Literal["wait", "skip"]


_TIDY_SECONDS = 60.0


class Settings(msgspec.Struct, frozen=True):
    """See `reshard_trainer.attach`.

    Attributes:
        publish_every: of how many optimizer steps one is published.
        deadline_seconds: bound of each phase of a refit.
        transport: how bytes move.
        install: `staged` or `in_place`.
        share: what shared memory shows: a snapshot, or the live weights.
        overlap: whether the bytes move beside the next forward and backward pass.
        busy_engines: what a publish does about an engine that still takes an earlier version.
        bucket_bytes: largest message, in bytes.
        buffer_bytes: most memory that a rank takes beside its weights; None: no bound.
        prefix_cache: whether KV blocks of the old weights are dropped.
        on_failure: whether a failed engine ends the step with an error.
        takeover: whether to replace another trainer's session.
        verify: in which refits both ends compare digests of what went between them.
        replicas: before which publishes ranks that hold the same elements compare digests of them.
        host: address, host name or interface on which the control board listens; empty: that from
            which the first engine is reached.
        store: folder in which each published version is written; empty: nowhere.
        keep: how many versions stay there.
        stored: of `restore`: the version that engines read from a store.
    """

    publish_every: int = 1
    deadline_seconds: float = 120.0
    transport: Transport = "auto"
    install: Install = "staged"
    share: Share = "snapshot"
    overlap: bool = False
    busy_engines: BusyEngines = "wait"
    bucket_bytes: int = 16 * 2**20
    buffer_bytes: int | None = None
    prefix_cache: PrefixCache = "reset"
    on_failure: OnFailure = "raise"
    takeover: bool = False
    verify: Verify = "first"
    replicas: Replicas = "first"
    host: str = ""
    store: str = ""
    keep: int = 2
    stored: StoredAt | None = None

    @property
    def patience_seconds(self) -> float:
        """How long a refit takes at most: one deadline for each of its phases, and tidying up."""
        return 2 * self.deadline_seconds + _TIDY_SECONDS

    @property
    def keeps(self) -> bool:
        """Whether a copy is made of what the weights themselves would be read for."""
        return self.busy_engines == "skip" and self.share == "snapshot"

    @property
    def group_host(self) -> str | None:
        """What the private group listens on; an address of one machine is none of another's."""
        return self.host if self.host in interfaces() else None

    def __post_init__(self) -> None:
        faults = []
        for name in ("publish_every", "deadline_seconds", "bucket_bytes", "keep"):
            if getattr(self, name) <= 0:
                faults.append(f"{name}={getattr(self, name)!r}: give a positive number")
        if self.busy_engines == "skip" and not self.overlap:
            faults.append(
                f"busy_engines={self.busy_engines!r} with overlap=False: each step waits for all "
                "engines then, so none is ever busy; say overlap=True"
            )
        if self.buffer_bytes is not None:
            if self.install != "in_place":
                faults.append(
                    f"buffer_bytes={self.buffer_bytes!r} with install={self.install!r}: a second "
                    'shard has no bound; choose install="in_place"'
                )
            if self.keeps:
                faults.append(
                    f"buffer_bytes={self.buffer_bytes!r} with busy_engines='skip': the copy that a "
                    'slow engine reads has no bound; choose share="live"'
                )
            if self.buffer_bytes < LEAST_BUFFER_BYTES:
                faults.append(
                    f"buffer_bytes={self.buffer_bytes!r}: give at least {LEAST_BUFFER_BYTES}"
                )
        for field in msgspec.structs.fields(self):
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError as error:
                faults.append(f"{field.name}={getattr(self, field.name)!r}: {error}")
        if faults:
            raise ReshardError("these settings cannot be used", faults)
