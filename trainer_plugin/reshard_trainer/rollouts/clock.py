"""Deadlines and wake-ups on the event loop's clock.

The event loop is the clock: tests run on a loop whose time is virtual. `reshard.board.Deadline`
counts on the machine's clock and cannot be used here.
"""

import asyncio
from dataclasses import dataclass


def now() -> float:
    """The running loop's time, in seconds."""
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class Until:
    """When something must have ended; handed down through nested waits.

    Attributes:
        at: on the running loop's clock, in seconds.
        seconds: how long it had in all, for messages.
    """

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> "Until":
        """The deadline that lies `seconds` from now."""
        return cls(now() + seconds, seconds)

    def remaining(self) -> float:
        """Seconds that are left, never negative."""
        return max(0.0, self.at - now())

    @property
    def expired(self) -> bool:
        """Whether no time is left."""
        return self.remaining() == 0.0

    def sooner(self, seconds: float) -> "Until":
        """This deadline, or the one `seconds` from now, whichever comes first."""
        other = Until.after(seconds)
        return other if other.at < self.at else self

    def limit(self) -> asyncio.Timeout:
        """`async with until.limit():` raises `TimeoutError` at the deadline."""
        return asyncio.timeout_at(self.at)


class Pulse:
    """Wakes everyone who waits for a change; who waits looks again at what it waits for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        """Something changed."""
        self._event.set()
        self._event = asyncio.Event()

    async def next(self, until: Until) -> None:
        """Return at the next beat, or at the deadline."""
        try:
            async with until.limit():
                await self._event.wait()
        except TimeoutError:
            return
