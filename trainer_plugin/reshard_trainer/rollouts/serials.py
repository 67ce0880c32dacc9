"""A set of serials that stays small although a run is long.

Serials finish nearly in order, so a watermark and the few above it say which have.
"""

from collections.abc import Iterable

from reshard_trainer.rollouts.rollout import Serial


class SerialSet:
    """Serials; memory grows with how far out of order they come, not with their number.

    >>> done = SerialSet(map(Serial, [0, 1, 3]))
    >>> Serial(1) in done, Serial(2) in done, done.above
    (True, False, (3,))
    """

    def __init__(self, serials: Iterable[Serial] = (), *, below: int = 0) -> None:
        """Hold every serial under `below`, and `serials`."""
        self._below = below
        self._above: set[int] = set()
        for serial in serials:
            self.add(serial)

    def __contains__(self, serial: Serial) -> bool:
        return serial < self._below or serial in self._above

    def __len__(self) -> int:
        return self._below + len(self._above)

    @property
    def below(self) -> Serial:
        """Every serial under this one is in the set; this one is not."""
        return Serial(self._below)

    @property
    def above(self) -> tuple[Serial, ...]:
        """The others, ascending."""
        return tuple(Serial(serial) for serial in sorted(self._above))

    def add(self, serial: Serial) -> None:
        """Put one in; harmless when repeated."""
        if serial in self:
            return
        self._above.add(serial)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    def discard(self, serial: Serial) -> None:
        """Take one out, if it is there."""
        if serial >= self._below:
            self._above.discard(serial)
            return
        self._above.update(range(serial + 1, self._below))
        self._below = int(serial)
