"""Deadlines: points in time that a chain of waits shares."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock of this process.

    Attributes:
        seconds: how long the deadline was when it was made; for messages.
        at: monotonic time, in seconds.
    """

    seconds: float
    at: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """The deadline `seconds` from now."""
        return cls(seconds, time.monotonic() + seconds)

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether nothing is left."""
        return self.remaining() == 0.0

    def sooner(self, seconds: float) -> "Deadline":
        """This deadline, or the one `seconds` from now, whichever comes first."""
        other = Deadline.after(seconds)
        return other if other.at < self.at else self
