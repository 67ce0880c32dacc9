"""What a trainer needs of an engine's control plane: any object with these calls can be refitted.

The calls carry small messages; every outcome inside the engine is reported on the control board,
because an exception in a vLLM worker leaves its later replies out of step for good (vllm#49972).

What a failure means is the same for every call:

- `EngineError`: the engine was not reached, or answered that it refuses.
- `DeadlineExceeded`: no answer in time. The call may still take effect later, so nothing may be
  repeated; the next session's `connect` waits behind it in the engine and then tells the state.

Not here: HTTP and in-process engines (`reshard_trainer`), the order of calls of a refit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from reshard.board import Deadline

Message = Mapping[str, object]
"""A message of `reshard.session` as plain JSON values."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine says of itself before anything is asked of its workers.

    Attributes:
        ranks: of all its workers, data-parallel replicas included.
        weight_version: the label that its outputs carry now.
        paused: whether it holds requests back.
    """

    ranks: int
    weight_version: str
    paused: bool


@runtime_checkable
class Fenceable(Protocol):
    """An engine that can be told to refuse requests, beyond holding them."""

    def fence(self, reason: str, deadline: Deadline) -> bool:
        """Refuse every request with this reason, ending those that are held; empty: no longer.

        Returns:
            whether it can: an engine that cannot holds requests as long as it is paused.
        """


@runtime_checkable
class EngineControl(Protocol):
    """The control plane of one engine, all its ranks. Calls are made one at a time."""

    @property
    def name(self) -> str:
        """How messages and board keys call this engine; differs between a trainer's engines."""

    def describe(self, deadline: Deadline) -> EngineDescription:
        """Check that the engine can be refitted; reaches no worker, so it may be repeated.

        Raises:
            EngineError: unreachable, or started without what a refit needs; says what to change.
        """

    def connect(self, message: Message, deadline: Deadline) -> None:
        """Have every rank join a session (`ConnectInfo`); returns when all have joined or failed.

        Safe at any time: a rank leaves its former session first.
        """

    def begin(self, deadline: Deadline) -> None:
        """Open the engine's own update session, which must not be open."""

    def receive(self, message: Message, deadline: Deadline) -> None:
        """Have every rank start to receive a version (`ReceiveInfo`); returns at once."""

    def commit(self, message: Message, deadline: Deadline) -> None:
        """Have every rank make the received version live (`CommitInfo`)."""

    def finish(self, version: str | None, deadline: Deadline) -> None:
        """Close the engine's own update session, which must be open; set its version if given."""

    def pause(self, deadline: Deadline) -> None:
        """Hold running and new requests where they are; their KV blocks stay."""

    def resume(self, deadline: Deadline) -> None:
        """Let requests run again."""

    def reset_prefix_cache(self, deadline: Deadline) -> bool:
        """Drop all KV blocks, those of held requests too; whether all are gone. Repeatable."""

    def weight_version(self, deadline: Deadline) -> str:
        """The label that the engine's outputs carry now. Repeatable."""

    def release(self, deadline: Deadline) -> None:
        """Have every rank leave its session; no update session may be open."""

    def close(self) -> None:
        """Drop this client; the engine serves on."""
