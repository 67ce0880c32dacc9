"""How much an engine takes on, learnt from what becomes of its groups.

Every running group holds a place at the gate. An engine that is too slow for the bound would hold
places with groups that are overtaken in the end, and so hold up the faster ones: each time that
happens it takes on half as much, and then rests for some times as long as the group had held its
place. Groups that arrive in time bring it back. Pure; time is an argument.
"""

from typing import Final

MOST_RESTS: Final = 4.0
"""Longest rest, as a multiple of the time that the overtaken group had held its place: a slow
engine, tried again and again, holds one place for at most a fifth of the time."""


class Pace:
    """One engine's.

    Attributes:
        allowed: groups that it may have in hand, at most its slots.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._in_a_row = 0
        self._rest_until = 0.0
        self.allowed = slots

    def room(self, in_hand: int, at: float) -> bool:
        """Whether it may take on one more."""
        return in_hand < self.allowed and at >= self._rest_until

    def rest(self, at: float) -> float:
        """Seconds until it may try again; 0 if it does not rest."""
        return max(0.0, self._rest_until - at)

    def arrived(self) -> None:
        """A group of its was in time."""
        self._in_a_row = 0
        self.allowed = min(self._slots, self.allowed + 1)

    def overtaken(self, held_seconds: float, at: float) -> None:
        """A group of its was overtaken after it had held its place so long.

        >>> pace = Pace(slots=2)
        >>> pace.overtaken(10.0, at=10.0); pace.overtaken(10.0, at=10.0)
        >>> pace.allowed, pace.rest(at=10.0)
        (1, 20.0)
        """
        if self.allowed > 1:
            self.allowed //= 2
            return
        if at < self._rest_until:
            return  # began before the rest
        self._in_a_row += 1
        self._rest_until = at + held_seconds * min(MOST_RESTS, 2.0**self._in_a_row)
