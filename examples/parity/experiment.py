"""What all runs have in common, and what each one tells."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from examples.parity.task import Task

from reshard_trainer import RefitReport


@dataclass(frozen=True, slots=True)
class Engine:
    """A server that is up.

    Attributes:
        url: of its HTTP API.
        slots: requests that it runs at once.
    """

    url: str
    slots: int

    @property
    def name(self) -> str:
        """As trainer and rollouts call it."""
        return self.url.partition("//")[2]


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is the same for all runs.

    Attributes:
        task: what is learned.
        start: folder of the checkpoint whose shape the policy has.
        engines: who generates, in all ways but one.
        batch: prompts a step.
        samples: of each prompt.
        steps: of a run.
    """

    task: Task
    start: Path
    engines: tuple[Engine, ...]
    batch: int = 8
    samples: int = 8
    steps: int = 80


@dataclass(slots=True)
class Run:
    """What one run tells, step by step.

    Attributes:
        way: which.
        seed: of weights, prompts and samples.
        rewards: mean of each batch.
        gaps: mean |log-probability in the trainer - when sampled| of each batch.
        seconds: from the start of the run to the end of each step.
        staleness: of all trained groups: how many, by versions.
        waited_seconds: in which the trainer had no batch. Co-located: in which it generated.
        publish_seconds: for which publishing held up the trainer.
        idle: by engine: share of time without a request.
        evicted: groups that became too old.
        state: a line for people.
    """

    way: str
    seed: int
    rewards: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    waited_seconds: float = 0.0
    publish_seconds: float = 0.0
    idle: dict[str, float] = field(default_factory=dict)
    evicted: int = 0
    state: str = ""

    @property
    def final_reward(self) -> float:
        """Mean of the last tenth of the steps."""
        last = self.rewards[-max(1, len(self.rewards) // 10) :]
        return sum(last) / len(last)

    @property
    def wall_seconds(self) -> float:
        """Of the whole run."""
        return self.seconds[-1]

    @property
    def trainer_idle(self) -> float:
        """Share of time in which the trainer neither trained nor published."""
        return self.waited_seconds / self.wall_seconds

    def note_publish(self, report: RefitReport) -> None:
        """A publish has ended."""
        self.publish_seconds += report.stall_seconds

    def as_json(self) -> dict[str, object]:
        """For `parity.json`."""
        return {
            "way": self.way,
            "seed": self.seed,
            "final_reward": self.final_reward,
            "wall_seconds": self.wall_seconds,
            "trainer_idle": self.trainer_idle,
            "engines_idle": self.idle,
            "publish_share": self.publish_seconds / self.wall_seconds,
            "staleness": {str(age): self.staleness[age] for age in sorted(self.staleness)},
            "evicted": self.evicted,
            "rewards": self.rewards,
            "log_probability_gaps": self.gaps,
            "seconds": self.seconds,
        }


Notice = Callable[[Run], None]
"""Called after each step of a run."""
