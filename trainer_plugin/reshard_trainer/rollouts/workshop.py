"""How a group is made from an assignment, whichever engine has it in hand.

Every way in which that can fail ends the assignment with a reason, so that its prompt is asked
again. Not here: when to start one (`producer.py`).
"""

import asyncio
import logging
from dataclasses import dataclass

import msgspec

from reshard.errors import EngineError, ReshardError
from reshard_trainer.rollouts.client import RolloutClient, Route, all_samples
from reshard_trainer.rollouts.clock import Until
from reshard_trainer.rollouts.desk import Assignment
from reshard_trainer.rollouts.desk_service import Desk
from reshard_trainer.rollouts.errors import RequestRefused
from reshard_trainer.rollouts.fleet import Seat
from reshard_trainer.rollouts.meter import Meter
from reshard_trainer.rollouts.refresh import Renewal
from reshard_trainer.rollouts.reward import Reward
from reshard_trainer.rollouts.rollout import Prompt, Rollout, RolloutGroup, SampleId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all producers of one process share.

    Attributes:
        desk: gives out prompts, takes groups.
        client: makes samples.
        renewal: brings engines to newer versions.
        reward: scores rollouts.
        samples: of each prompt.
        group_seconds: longest that one group may take.
        meter: counts.
    """

    desk: Desk
    client: RolloutClient
    renewal: Renewal
    reward: Reward
    samples: int
    group_seconds: float
    meter: Meter

    async def make(self, assignment: Assignment, home: Seat) -> RolloutGroup | None:
        """One group, preferably from `home`; None: it could not be made and was given up."""
        until = Until.after(self.group_seconds)
        try:
            return await self._make(assignment, home, until)
        except RequestRefused as error:
            await self._give_up(assignment, error, charge=1)
        except EngineError as error:
            await self._give_up(assignment, error, charge=1 if until.expired else 0)
        except Exception as error:
            if not isinstance(error, ReshardError):
                logger.exception("prompt %d could not be scored", assignment.serial)
            await self._give_up(assignment, error, charge=1)
        return None

    async def _make(self, assignment: Assignment, home: Seat, until: Until) -> RolloutGroup:
        ids = [SampleId(assignment.serial, sample) for sample in range(self.samples)]
        route = Route(at_least=assignment.version, home=home)
        rollouts = await all_samples(self.client, ids, assignment.prompt, route, until)
        scored = await score_all(self.reward, assignment.prompt, rollouts)
        return RolloutGroup(assignment.serial, assignment.attempt, scored)

    async def _give_up(self, assignment: Assignment, error: Exception, *, charge: int) -> None:
        await self.desk.give_up(assignment.ticket, f"{type(error).__name__}: {error}", charge)


async def score_all(
    reward: Reward, prompt: Prompt, rollouts: tuple[Rollout, ...]
) -> tuple[Rollout, ...]:
    """The rollouts with their rewards."""
    rewards = await asyncio.gather(*(reward(prompt, rollout) for rollout in rollouts))
    return tuple(
        msgspec.structs.replace(rollout, reward=float(each))
        for rollout, each in zip(rollouts, rewards, strict=True)
    )
