"""The admission gate: how much generation may be under way, by the engine's version.

Counts, nothing else: no clock, no rollouts, no sockets.
"""

from typing import NamedTuple

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.errors import RolloutError
from reshard_trainer.rollouts.rollout import Serial
from reshard_trainer.rollouts.staleness import StalenessBound


class Ticket(NamedTuple):
    """One admission: a prompt, given out for the n-th time.

    Attributes:
        serial: of the prompt.
        attempt: how often it had been given out before, from 0.
    """

    serial: Serial
    attempt: int


class AdmissionGate:
    """Admits while `accepted + running < (max_staleness + engine_version + 1) * batch`.

    Attributes:
        accepted: groups that were trained, are being trained, or wait in the buffer. Groups that
            were evicted or given up do not count: their place is free again.
    """

    def __init__(self, bound: StalenessBound, trainer_version: PolicyVersion) -> None:
        """Start, or start again, at a version: what its steps took counts as accepted."""
        self._bound = bound
        self._running: dict[Ticket, PolicyVersion] = {}
        self.accepted = bound.consumed(trainer_version)

    @property
    def running(self) -> int:
        """Groups that are being generated."""
        return len(self._running)

    def admits(self, engine_version: PolicyVersion) -> bool:
        """Whether an engine at this version may start one more group."""
        return self.accepted + self.running < self._bound.admitted(engine_version)

    def start(self, ticket: Ticket, engine_version: PolicyVersion) -> None:
        """A group starts on an engine.

        Raises:
            RolloutError: the gate does not admit it, or it runs already.
        """
        if ticket in self._running:
            raise RolloutError(f"{ticket} runs already")
        if not self.admits(engine_version):
            raise RolloutError(
                f"{ticket} is not admitted on an engine at version {engine_version}: "
                f"{self.accepted} accepted, {self.running} running, at most "
                f"{self._bound.admitted(engine_version)}"
            )
        self._running[ticket] = engine_version

    def runs(self, ticket: Ticket) -> bool:
        """Whether it was started and has not stopped."""
        return ticket in self._running

    def accept(self, ticket: Ticket) -> None:
        """A running group enters the buffer."""
        del self._running[ticket]
        self.accepted += 1

    def stop(self, ticket: Ticket) -> None:
        """A running group ends without entering the buffer."""
        del self._running[ticket]

    def readmit(self) -> None:
        """A group enters the buffer without having run here: from a saved state."""
        self.accepted += 1

    def evict(self) -> None:
        """A group leaves the buffer untrained."""
        self.accepted -= 1

    def overtaken(self, trainer_version: PolicyVersion) -> tuple[Ticket, ...]:
        """Running groups that will be too old for a trainer at this version, whenever they end."""
        return tuple(
            ticket
            for ticket, version in self._running.items()
            if not self._bound.fresh(version, trainer_version)
        )
