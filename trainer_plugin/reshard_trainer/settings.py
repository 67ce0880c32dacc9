"""How a trainer publishes: decided on trainer rank 0, the same on all ranks."""

from typing import Literal

import msgspec

from reshard.board.addresses import interfaces
from reshard.errors import ReshardError
from reshard.session import Install, Transport, Verify

PrefixCache = Literal["reset", "keep"]
OnFailure = Literal["raise", "continue"]


class Settings(msgspec.Struct, frozen=True):
    """See `reshard_trainer.attach`.

    Attributes:
        publish_every: of how many optimizer steps one is published.
        deadline_seconds: bound of each phase of a refit.
        transport: how bytes move.
        install: `staged` or `in_place`.
        bucket_bytes: largest message, in bytes.
        prefix_cache: whether KV blocks of the old weights are dropped.
        on_failure: whether a failed engine ends the step with an error.
        takeover: whether to replace another trainer's session.
        verify: in which refits both ends compare digests of what went between them.
        host: address, host name or interface on which the control board listens; empty: that from
            which the first engine is reached.
    """

    publish_every: int = 1
    deadline_seconds: float = 120.0
    transport: Transport = "auto"
    install: Install = "staged"
    bucket_bytes: int = 16 * 2**20
    prefix_cache: PrefixCache = "reset"
    on_failure: OnFailure = "raise"
    takeover: bool = False
    verify: Verify = "first"
    host: str = ""

    @property
    def group_host(self) -> str | None:
        """What the private group listens on; an address of one machine is none of another's."""
        return self.host if self.host in interfaces() else None

    def __post_init__(self) -> None:
        faults = []
        for name in ("publish_every", "deadline_seconds", "bucket_bytes"):
            if getattr(self, name) <= 0:
                faults.append(f"{name}={getattr(self, name)!r}: give a positive number")
        for field in msgspec.structs.fields(self):
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError as error:
                faults.append(f"{field.name}={getattr(self, field.name)!r}: {error}")
        if faults:
            raise ReshardError("these settings cannot be used", faults)
