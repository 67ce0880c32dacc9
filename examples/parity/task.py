"""What is learned: to count on by the stride that the prompt names.

A prompt is `[start, stride]`; the right continuation is `start + stride`, `start + 2 * stride`, ...
modulo `NUMBERS`. Each token is judged by the one before it, so what is right depends on what was
sampled, and rollouts of an older policy visit other places than the present one would: staleness
can hurt.
"""

import random
from dataclasses import dataclass

from reshard_trainer.rollouts.rollout import Prompt, PromptId, Rollout

NUMBERS = 16  # token ids 0 .. 15
STRIDES = (1,)  # stride number n is the token id NUMBERS + n
VOCAB = 32  # the rest is there to be unlearned
LENGTH = 16  # tokens of a rollout


@dataclass(frozen=True, slots=True)
class Task:
    """A verifiable task.

    Attributes:
        name: for figures.
        prompts: the data set.
        length: tokens of a rollout.
    """

    name: str
    prompts: tuple[Prompt, ...]
    length: int

    def reward(self, prompt: Prompt, rollout: Rollout) -> float:
        """Share of tokens that follow from the one before."""
        return counting_reward(prompt.tokens, rollout.tokens)


def counting_reward(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> float:
    """Share of tokens that are the one before plus the stride.

    >>> counting_reward((3, 16), (4, 5, 9, 10))
    0.75
    """
    start, stride = prompt[0], STRIDES[prompt[1] - NUMBERS]
    before = (start, *tokens[:-1])
    right = (
        a < NUMBERS and b == (a + stride) % NUMBERS for a, b in zip(before, tokens, strict=True)
    )
    return sum(right) / len(tokens)


def counting() -> Task:
    """Every start with every stride."""
    prompts = [
        Prompt(PromptId(f"{start}+{stride}"), (start, NUMBERS + number))
        for start in range(NUMBERS)
        for number, stride in enumerate(STRIDES)
    ]
    random.Random(0).shuffle(prompts)
    return Task("count on", tuple(prompts), LENGTH)
