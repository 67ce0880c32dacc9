"""How groups are made, in either mode: settings alone."""

import random
from dataclasses import dataclass, field

from reshard_trainer.engines import InFlight
from reshard_trainer.rollouts.client import RolloutClient
from reshard_trainer.rollouts.errors import RolloutError
from reshard_trainer.rollouts.fleet import Fleet
from reshard_trainer.rollouts.reward import Reward
from reshard_trainer.rollouts.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Generating:
    """Settings of a run's rollouts.

    Attributes:
        sampling: of all samples.
        reward: scores rollouts.
        samples: of each prompt.
        in_flight: what becomes of running requests when the weights change (asynchronous mode).
        attempts: engines' failures that one sample survives, less one.
        request_seconds: longest that one engine may take for one request.
        group_seconds: longest that one group may take (asynchronous mode).
        refresh_seconds: longest that one refresh of an engine may take.
        check_seconds: longest that an engine may take to answer whether it can take part.
        chance: of rests and names; not of sampling.
    """

    sampling: Sampling
    reward: Reward
    samples: int = 1
    in_flight: InFlight = "keep"
    attempts: int = 4
    request_seconds: float = 600.0
    group_seconds: float = 1200.0
    refresh_seconds: float = 300.0
    check_seconds: float = 30.0
    chance: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        faults = [
            f"{name}={getattr(self, name)!r}: give a positive number"
            for name in (
                "samples",
                "attempts",
                "request_seconds",
                "group_seconds",
                "refresh_seconds",
                "check_seconds",
            )
            if not getattr(self, name) > 0
        ]
        if faults:
            raise RolloutError("these settings cannot be used", faults)

    def client(self, fleet: Fleet) -> RolloutClient:
        """A client of a fleet that works so."""
        return RolloutClient(
            fleet,
            self.sampling,
            attempts=self.attempts,
            request_seconds=self.request_seconds,
            chance=self.chance,
        )
