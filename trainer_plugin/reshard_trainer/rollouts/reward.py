"""What a rollout is worth: one awaitable call a rollout, so that a slow judge blocks nobody."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from reshard_trainer.rollouts.rollout import Prompt, Rollout


class Reward(Protocol):
    """Scores rollouts."""

    async def __call__(self, prompt: Prompt, rollout: Rollout) -> float:
        """The reward, a finite number."""


def immediate(score: Callable[[Prompt, Rollout], float]) -> Reward:
    """A reward that is cheap to compute."""

    async def reward(prompt: Prompt, rollout: Rollout) -> float:
        return score(prompt, rollout)

    return reward


def threaded(score: Callable[[Prompt, Rollout], float]) -> Reward:
    """A reward that takes a while (it runs a program, asks a judge), each in a thread."""

    async def reward(prompt: Prompt, rollout: Rollout) -> float:
        return await asyncio.to_thread(score, prompt, rollout)

    return reward
