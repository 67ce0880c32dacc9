"""What a run costs, as measured or guessed: the input of sizing."""

from dataclasses import dataclass

from reshard.errors import ReshardError


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """One engine.

    Attributes:
        slots: groups that it generates at once.
        group_seconds: mean time of one group when all slots are taken.
        transfer_seconds: from the end of an optimizer step until the new weights are at the
            engine; it generates on meanwhile.
        pause_seconds: how long it stands still while new weights become live.
    """

    slots: int
    group_seconds: float
    transfer_seconds: float = 0.0
    pause_seconds: float = 0.0

    @property
    def groups_per_second(self) -> float:
        """At full load."""
        return self.slots / self.group_seconds


@dataclass(frozen=True, slots=True)
class Workload:
    """One run.

    Attributes:
        step_seconds: of the trainer's step, what publishing costs it included.
        batch: groups that one step takes.
        engines: who generates.
        publish_every: optimizer steps from one published version to the next.
        spread: how much the time of a group varies around its mean, as a share.
    """

    step_seconds: float
    batch: int
    engines: tuple[EngineSpeed, ...]
    publish_every: int = 1
    spread: float = 0.3

    def __post_init__(self) -> None:
        faults = []
        if not self.engines:
            faults.append("no engine")
        if self.step_seconds <= 0 or self.batch < 1 or self.publish_every < 1:
            faults.append(
                f"step_seconds {self.step_seconds:g}, batch {self.batch}, publish_every "
                f"{self.publish_every}: all must be positive"
            )
        if not 0 <= self.spread < 1:
            faults.append(f"spread {self.spread:g}: a share of at least 0 and less than 1")
        for number, engine in enumerate(self.engines):
            if engine.slots < 1 or engine.group_seconds <= 0:
                faults.append(f"engine {number}: slots and group_seconds must be positive")
            if engine.transfer_seconds < 0 or engine.pause_seconds < 0:
                faults.append(f"engine {number}: transfer and pause take 0 seconds or more")
        if faults:
            raise ReshardError("this workload cannot be sized", faults)

    @property
    def generation_seconds(self) -> float:
        """Least time in which the engines, all at full load, make a batch."""
        return self.batch / sum(engine.groups_per_second for engine in self.engines)

    @property
    def pause_seconds(self) -> float:
        """Of the engine that stands still for longest, per step."""
        return max(engine.pause_seconds for engine in self.engines) / self.publish_every
