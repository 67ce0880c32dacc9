"""Rollouts of the trainer's own model, in the form in which engines answer."""

from collections.abc import Mapping

import msgspec
import torch
from examples.parity.experiment import Experiment
from examples.parity.learner import Learner

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.rollout import (
    Prompt,
    Rollout,
    RolloutGroup,
    SampleId,
    Serial,
    VersionSpan,
)


class OwnModel:
    """Generates with the model that is trained."""

    def __init__(self, learner: Learner, experiment: Experiment, seed: int) -> None:
        self._model = learner.model
        self._experiment = experiment
        self._dice = torch.Generator().manual_seed(seed)

    def generate(
        self, prompts: Mapping[Serial, Prompt], version: PolicyVersion
    ) -> tuple[RolloutGroup, ...]:
        """The groups of these prompts (of equal length), in one batch."""
        samples = self._experiment.samples
        rows = [prompt.tokens for prompt in prompts.values() for _ in range(samples)]
        tokens, log_probs = self._sample(torch.tensor(rows))
        groups = []
        for number, (serial, prompt) in enumerate(prompts.items()):
            part = slice(number * samples, (number + 1) * samples)
            answers = zip(tokens[part].tolist(), log_probs[part].tolist(), strict=True)
            rollouts = tuple(
                self._rollout(SampleId(serial, sample), prompt, version, *answer)
                for sample, answer in enumerate(answers)
            )
            groups.append(RolloutGroup(serial, 0, rollouts))
        return tuple(groups)

    @torch.no_grad()
    def _sample(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, length] tokens, and the log-probability of each."""
        new, cache = prompts, None
        tokens, log_probs = [], []
        for _ in range(self._experiment.task.length):
            answer = self._model(new, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            scores = answer.logits[:, -1].log_softmax(-1)
            new = torch.multinomial(scores.exp(), 1, generator=self._dice)
            tokens.append(new)
            log_probs.append(scores.gather(-1, new))
        return torch.cat(tokens, 1), torch.cat(log_probs, 1)

    def _rollout(
        self,
        sample: SampleId,
        prompt: Prompt,
        version: PolicyVersion,
        tokens: list[int],
        log_probs: list[float],
    ) -> Rollout:
        rollout = Rollout(
            id=sample,
            prompt=prompt.name,
            prompt_tokens=prompt.tokens,
            tokens=tuple(tokens),
            log_probs=tuple(log_probs),
            spans=(VersionSpan(version, 0, len(tokens)),),
            finish="length",
        )
        reward = self._experiment.task.reward(prompt, rollout)
        return msgspec.structs.replace(rollout, reward=reward)
