"""The one tree of errors that users see.

A message says what was given, what was expected, where (tensor, rank, phase), and what to do.
All mismatches of a kind are listed together (`ReshardError.faults`).
"""

from collections.abc import Iterable


class ReshardError(Exception):
    """Base of every error raised by reshard.

    Attributes:
        faults: every fault that was found, one line each, in a stable order.
    """

    def __init__(self, message: str, faults: Iterable[str] = ()) -> None:
        self.faults = tuple(faults)
        lines = [message, *(f"  - {fault}" for fault in self.faults)]
        super().__init__("\n".join(lines))


class LayoutError(ReshardError):
    """A region, view, mesh or sharding that cannot exist."""


class PlanError(ReshardError):
    """Source and destination layouts that no plan can join (missing, unknown, mismatched)."""


class DigestMismatch(ReshardError):
    """Ranks that hold different plans, or bytes that are not the bytes that were published."""


class WireError(ReshardError):
    """A message that is malformed, too large, replayed, or from another run."""


class DeadlineExceeded(ReshardError):
    """A wait that ended by its deadline; names the phase and the ranks that did not answer."""


class PeerError(ReshardError):
    """A failure on another rank; carries that rank's own error text."""


class EngineError(ReshardError):
    """An engine that cannot be refitted: unreachable, flagless, taken, fenced, or failed."""


class RecordingError(ReshardError):
    """A loader whose layout could not be recorded or proven."""
