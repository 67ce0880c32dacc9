"""A point in time that every wait of one phase shares."""

import math
import time
from dataclasses import dataclass

from reshard.errors import ReshardError


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a phase must have ended; handed down unchanged through nested waits.

    Attributes:
        at: on this process's monotonic clock, in seconds; never sent to another process.
        seconds: how long the phase had in all, for messages.
    """

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """The deadline that lies `seconds` from now; 0 or less is already over.

        >>> Deadline.after(0).expired, Deadline.after(60).expired
        (True, False)
        """
        if math.isnan(seconds):
            raise ReshardError("a deadline of nan seconds; give a number of seconds")
        return cls(time.monotonic() + seconds, seconds)

    def remaining(self) -> float:
        """Seconds that are left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether no time is left."""
        return self.remaining() == 0.0

    def sooner(self, seconds: float) -> "Deadline":
        """This deadline, or the one `seconds` from now, whichever comes first."""
        other = Deadline.after(seconds)
        return other if other.at < self.at else self
