"""The trainer's part, the same in all four ways: one GRPO step on groups of rollouts."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaForCausalLM

from reshard_trainer.rollouts.rollout import RolloutGroup

LEARNING_RATE = 1e-3  # high: four steps make another policy
MOST_WEIGHT = 2.0  # of a token that the present policy likes better than the one that sampled it


@dataclass(frozen=True, slots=True)
class Learned:
    """What one step tells.

    Attributes:
        reward: mean of what it learned from.
        gap: mean |log-probability now - when sampled|: of fresh rollouts, that of two kernels.
    """

    reward: float
    gap: float


@dataclass(frozen=True, slots=True)
class Learner:
    """A policy and its optimizer.

    Attributes:
        model: in fp32, on one rank.
        optimizer: whose steps make versions.
    """

    model: LlamaForCausalLM
    optimizer: torch.optim.Optimizer

    @classmethod
    def start(cls, folder: Path, seed: int) -> "Learner":
        """A policy of the checkpoint's shape with random weights of its own."""
        torch.manual_seed(seed)
        model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
        return cls(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))

    def step(self, groups: Sequence[RolloutGroup]) -> Learned:
        """One optimizer step."""
        loss, gap = grpo_loss(self.model, groups)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        rewards = [rollout.reward or 0.0 for group in groups for rollout in group.rollouts]
        return Learned(statistics.mean(rewards), gap)


def grpo_loss(model: torch.nn.Module, groups: Sequence[RolloutGroup]) -> tuple[torch.Tensor, float]:
    """The policy loss, and the gap; a token weighs as much more as it is likelier now than then.

    That weight (truncated) is what makes rollouts of older weights usable; where they are of the
    present ones it is 1.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    advantage = torch.tensor([value for group in groups for value in advantages(group)])[:, None]
    tokens = torch.tensor([(*rollout.prompt_tokens, *rollout.tokens) for rollout in rollouts])
    sampled = torch.tensor([rollout.log_probs for rollout in rollouts])
    length = sampled.shape[1]

    logits = model(tokens).logits[:, -length - 1 : -1]
    chosen = tokens[:, -length:, None]
    current = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    gap = (current.detach() - sampled).abs().mean().item()
    weight = (current.detach() - sampled).exp().clamp(max=MOST_WEIGHT)
    return -(weight * current * advantage).mean(), gap


def advantages(group: RolloutGroup) -> list[float]:
    """How much better than its group each rollout is, in standard deviations."""
    rewards = [rollout.reward or 0.0 for rollout in group.rollouts]
    mean, spread = statistics.mean(rewards), statistics.pstdev(rewards)
    return [(value - mean) / (spread + 1e-4) for value in rewards]
