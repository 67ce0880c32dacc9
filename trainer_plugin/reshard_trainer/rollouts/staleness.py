"""How old a rollout may be when it is trained, and what follows for admission.

A version is a number of optimizer steps. The trainer at version `v` has made `v` steps and taken
`v` batches; it publishes versions `0, p, 2p, ...`. Pure arithmetic; not here: counting
(`gate.py`), storing (`buffer.py`).
"""

from dataclasses import dataclass
from typing import Literal

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.errors import RolloutError

Overdue = Literal["evict", "importance_weight"]
"""What becomes of a group beyond the bound.

`evict`: it leaves the buffer, its prompt is asked again. `importance_weight`: it is handed out,
listed in `Batch.overdue`, and the trainer weights it by the ratio of its probabilities now and
then.
"""


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The settings that both sides of the buffer obey.

    Attributes:
        batch: groups that one optimizer step takes.
        max_staleness: most versions between a rollout's oldest token and the trainer that takes it.
        publish_every: optimizer steps from one published version to the next.
    """

    batch: int
    max_staleness: int
    publish_every: int = 1

    def __post_init__(self) -> None:
        faults: list[str] = []
        if self.batch < 1:
            faults.append(f"batch {self.batch}: at least one group a step")
        if self.publish_every < 1:
            faults.append(f"publish_every {self.publish_every}: at least 1")
        if self.max_staleness < 0:
            faults.append(f"max_staleness {self.max_staleness}: 0 or more")
        elif self.max_staleness < self.publish_every - 1:
            faults.append(
                f"publish_every {self.publish_every} makes rollouts up to {self.publish_every - 1} "
                f"versions old, but max_staleness is {self.max_staleness}: no batch would ever be "
                f"complete; set max_staleness >= {self.publish_every - 1}"
            )
        if faults:
            raise RolloutError("these staleness settings cannot work", faults)

    def admitted(self, engine_version: PolicyVersion) -> int:
        """How many groups may have been accepted or be running, of the whole run, for an engine.

        Group number `n` (from 0) is taken at version `n // batch` or later; the bound holds if
        that is at most `max_staleness` above the version that generated it.

        >>> StalenessBound(batch=4, max_staleness=1).admitted(PolicyVersion(0))
        8
        """
        return (self.max_staleness + engine_version + 1) * self.batch

    def consumed(self, trainer_version: PolicyVersion) -> int:
        """Groups that were trained by the steps that led to `trainer_version`."""
        return trainer_version * self.batch

    def fresh(self, oldest: PolicyVersion, trainer_version: PolicyVersion) -> bool:
        """Whether a group of version `oldest` may be trained at `trainer_version`.

        >>> bound = StalenessBound(batch=4, max_staleness=1)
        >>> bound.fresh(PolicyVersion(2), PolicyVersion(3))
        True
        >>> bound.fresh(PolicyVersion(1), PolicyVersion(3))
        False
        """
        return trainer_version - oldest <= self.max_staleness
