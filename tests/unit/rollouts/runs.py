"""Whole asynchronous runs on simulated engines, watched from outside."""

import asyncio
import random
from dataclasses import dataclass, field

from tests.unit.rollouts.simulated import Prompts, SimulatedEngine, SimulatedTrainer

from reshard.ids import PolicyVersion
from reshard_trainer.engines import InFlight
from reshard_trainer.rollouts.asynchronous import AsynchronousRollouts
from reshard_trainer.rollouts.buffer import Batch
from reshard_trainer.rollouts.clock import now
from reshard_trainer.rollouts.desk import DeskSettings, SavedDesk
from reshard_trainer.rollouts.generating import Generating
from reshard_trainer.rollouts.reward import Reward, immediate
from reshard_trainer.rollouts.rollout import EngineName, Prompt, Rollout
from reshard_trainer.rollouts.sampling import Sampling
from reshard_trainer.rollouts.staleness import StalenessBound


def half(prompt: Prompt, rollout: Rollout) -> float:
    return 0.5


@dataclass
class Scenario:
    """One run.

    Attributes:
        bound: batch, staleness, cadence.
        steps: optimizer steps to make.
        step_seconds: of one step.
        engines: who takes part.
        refresh_seconds: by engine.
        refresh_failures: share of refreshes that fail.
        in_flight: what becomes of running requests.
        tokens: of each sample.
        samples: of each prompt.
        seed: of everything random.
        prompts: length of the stream.
    """

    bound: StalenessBound
    steps: int = 6
    step_seconds: float = 5.0
    engines: list[SimulatedEngine] = field(default_factory=list)
    refresh_seconds: dict[EngineName, float] = field(default_factory=dict)
    refresh_failures: float = 0.0
    in_flight: InFlight = "keep"
    tokens: int = 4
    samples: int = 1
    seed: int = 0
    prompts: int | None = None
    max_charges: int = 1000
    reward: Reward = field(default_factory=lambda: immediate(half))
    patience: float = 1e5

    def trainer(self) -> SimulatedTrainer:
        return SimulatedTrainer(
            {engine.name: engine for engine in self.engines},
            dict(self.refresh_seconds),
            failure_share=self.refresh_failures,
            chance=random.Random(self.seed),
        )

    def how(self) -> Generating:
        return Generating(
            sampling=Sampling(max_tokens=self.tokens, seed=7),
            reward=self.reward,
            samples=self.samples,
            in_flight=self.in_flight,
            chance=random.Random(self.seed),
        )

    def rollouts(
        self, trainer: SimulatedTrainer, saved: SavedDesk | None = None
    ) -> AsynchronousRollouts:
        settings = DeskSettings(self.bound, max_charges=self.max_charges)
        return AsynchronousRollouts(
            Prompts(self.prompts), trainer, self.how(), settings, saved=saved
        )


@dataclass
class Outcome:
    """What a run did.

    Attributes:
        batches: in order.
        seconds: virtual time that it took.
        rollouts: to look into.
    """

    batches: list[Batch]
    seconds: float
    rollouts: AsynchronousRollouts

    @property
    def serials(self) -> list[int]:
        return [group.serial for batch in self.batches for group in batch.groups]


async def drive(scenario: Scenario) -> Outcome:
    """A run from beginning to end."""
    trainer = scenario.trainer()
    rollouts = scenario.rollouts(trainer)
    await rollouts.join(*scenario.engines)
    start = now()
    batches = await steps(scenario, rollouts, trainer, 0, scenario.steps)
    seconds = now() - start
    await rollouts.close()
    return Outcome(batches, seconds, rollouts)


async def steps(
    scenario: Scenario,
    rollouts: AsynchronousRollouts,
    trainer: SimulatedTrainer,
    first: int,
    last: int,
) -> list[Batch]:
    """Train from version `first` to version `last`."""
    batches: list[Batch] = []
    for version in range(first, last):
        batches.append(await rollouts.take(PolicyVersion(version), scenario.patience))
        await asyncio.sleep(scenario.step_seconds)
        if (version + 1) % scenario.bound.publish_every == 0:
            trainer.published = PolicyVersion(version + 1)
            rollouts.publish(trainer.published)
    return batches
