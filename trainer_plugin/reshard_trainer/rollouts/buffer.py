"""The replay buffer: complete groups wait here until the trainer takes them, oldest first.

A plain object, driven by one thread; time plays no part. Exactly once: a serial that was ever
accepted is never accepted again, whoever delivers it. Not here: admission (`gate.py`), whose
prompt is asked next (`prompts.py`).
"""

import heapq
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.rollout import RolloutGroup, Serial
from reshard_trainer.rollouts.serials import SerialSet
from reshard_trainer.rollouts.staleness import Overdue, StalenessBound


class Verdict(StrEnum):
    """What the buffer did with a group."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """Its serial was accepted before."""
    EVICTED = "evicted"
    """It is older than the bound allows for the next step."""
    REJECTED = "rejected"
    """It bears a version that was never published: a label of another run, or a mistake."""
    LATE = "late"
    """Its admission had ended before: it was evicted while it ran, or counted as lost."""
    FULL = "full"
    """No room; the sender keeps it and offers it again. Only an unbounded sender meets this: the
    gate never admits more than the buffer holds."""


class Batch(msgspec.Struct, frozen=True):
    """What one optimizer step trains on.

    Attributes:
        version: of the trainer that takes it.
        groups: [batch] oldest version first.
        overdue: serials beyond the bound, kept by the policy `importance_weight`.
    """

    version: PolicyVersion
    groups: tuple[RolloutGroup, ...]
    overdue: frozenset[Serial] = frozenset()

    @property
    def staleness(self) -> tuple[int, ...]:
        """[batch] versions between each group's oldest token and the trainer (data staleness)."""
        return tuple(self.version - group.oldest for group in self.groups)


class ReplayBuffer:
    """Groups by version.

    Invariant: holds at most `capacity` groups, each of another serial, none of which was taken.
    """

    def __init__(
        self, bound: StalenessBound, *, overdue: Overdue = "evict", capacity: int | None = None
    ) -> None:
        """Make an empty buffer.

        Args:
            bound: batch size and greatest staleness.
            overdue: what becomes of groups beyond the bound.
            capacity: groups it holds at most; None: what the gate can have admitted.
        """
        self._bound = bound
        self._overdue = overdue
        self.capacity = capacity or (bound.max_staleness + 1) * bound.batch
        self._heap: list[tuple[PolicyVersion, int, RolloutGroup]] = []
        self._arrivals = 0
        self._closed = SerialSet()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def groups(self) -> tuple[RolloutGroup, ...]:
        """What waits, in the order in which it will be taken."""
        return tuple(group for _, _, group in sorted(self._heap))

    def offer(
        self, group: RolloutGroup, *, published: PolicyVersion, next_step: PolicyVersion
    ) -> Verdict:
        """Take a group in, or say why not.

        Args:
            group: complete and scored.
            published: the newest version that any engine can have.
            next_step: the version at which the trainer will take its next batch.
        """
        if self.closed(group.serial):
            return Verdict.DUPLICATE
        if group.newest > published:
            return Verdict.REJECTED
        if self._overdue == "evict" and not self._bound.fresh(group.oldest, next_step):
            return Verdict.EVICTED
        if len(self._heap) >= self.capacity:
            return Verdict.FULL
        self._closed.add(group.serial)
        heapq.heappush(self._heap, (group.oldest, self._arrivals, group))
        self._arrivals += 1
        return Verdict.ACCEPTED

    def evict(self, trainer_version: PolicyVersion) -> tuple[RolloutGroup, ...]:
        """Remove what a trainer at this version may not train; their serials may come again."""
        evicted: list[RolloutGroup] = []
        while (
            self._overdue == "evict"
            and self._heap
            and not self._bound.fresh(self._heap[0][0], trainer_version)
        ):
            _, _, group = heapq.heappop(self._heap)
            self._closed.discard(group.serial)
            evicted.append(group)
        return tuple(evicted)

    def take(self, trainer_version: PolicyVersion) -> Batch | None:
        """The batch of the step that a trainer at this version makes, or None: not enough yet.

        Call `evict` with the same version first.
        """
        if len(self._heap) < self._bound.batch:
            return None
        groups = tuple(heapq.heappop(self._heap)[2] for _ in range(self._bound.batch))
        overdue = frozenset(
            group.serial for group in groups if not self._bound.fresh(group.oldest, trainer_version)
        )
        return Batch(trainer_version, groups, overdue)

    def closed(self, serial: Serial) -> bool:
        """Whether no group of this serial will be accepted (again)."""
        return serial in self._closed

    def close(self, serial: Serial) -> None:
        """Never accept a group of this serial."""
        self._closed.add(serial)

    def restore(self, groups: Iterable[RolloutGroup], closed: SerialSet) -> None:
        """Go on where another buffer was saved.

        Args:
            groups: what waited there.
            closed: every serial that is not to be accepted (again), those of `groups` included.
        """
        self._closed = closed
        for group in groups:
            heapq.heappush(self._heap, (group.oldest, self._arrivals, group))
            self._arrivals += 1
