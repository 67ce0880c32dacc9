"""Rollouts: what an engine generated for a prompt, and by which weights.

Plain values that travel as MessagePack (`reshard.wire`), never pickle; decoding validates. Not
here: which rollouts may be trained (`staleness.py`), who generates them (`client.py`).
"""

import math
from collections.abc import Iterable
from typing import Literal, NewType

import msgspec

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.errors import RolloutError

PromptId = NewType("PromptId", str)
"""A prompt's name in its data set; the same in every epoch."""

Serial = NewType("Serial", int)
"""Position in the run's stream of prompts, from 0; never used twice in a run."""

EngineName = NewType("EngineName", str)
"""One engine, by the name that trainer and engine use for it."""

Mark = Literal["continued", "kept_kv", "resubmitted", "retried"]
"""What else happened to a rollout.

`continued`: weights changed while it ran. `kept_kv`: and it went on with KV blocks that older
weights had computed. `resubmitted`: it was aborted and went on from its own tokens. `retried`: an
engine failed on it, and it was generated anew, on another engine or later.
"""

Finish = Literal["stop", "length"]
"""Why generation ended: an end token or stop condition, or the limit of tokens."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens `[start, end)` were sampled by the weights of one version.

    Attributes:
        version: policy version.
        start: first token, counted in output tokens.
        end: one past the last token.
    """

    version: PolicyVersion
    start: int
    end: int


class SampleId(msgspec.Struct, frozen=True, order=True):
    """Which sample of which prompt of the run; the identity under which it counts once.

    Attributes:
        serial: of the prompt.
        sample: number within the prompt's group, from 0.
    """

    serial: Serial
    sample: int


class Prompt(msgspec.Struct, frozen=True):
    """What to continue.

    Attributes:
        name: in the data set.
        tokens: [prompt_length] token ids.
        task: free text for the reward function (an answer, a seed); not sent to engines.
    """

    name: PromptId
    tokens: tuple[int, ...]
    task: str = ""

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 0:
            raise RolloutError(f"prompt {self.name!r}: needs at least one token id, none negative")


class Rollout(msgspec.Struct, frozen=True):
    """One sampled continuation of one prompt.

    Invariant: `tokens`, `log_probs` and `spans` speak of the same tokens; the spans tile
    `[0, length)` in order and their versions never decrease.

    Attributes:
        id: which sample it is.
        prompt: the prompt's name.
        prompt_tokens: [prompt_length] token ids.
        tokens: [length] sampled token ids, `length >= 1`, the end token included.
        log_probs: [length] log-probability of each sampled token under the weights that sampled
            it, as that engine reports it (of the behaviour policy).
        spans: which version sampled which tokens.
        finish: why it ended.
        engines: which engines took part, in order.
        marks: what else happened.
        reward: None until it was scored.
    """

    id: SampleId
    prompt: PromptId
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: Finish
    engines: tuple[EngineName, ...] = ()
    marks: frozenset[Mark] = frozenset()
    reward: float | None = None

    def __post_init__(self) -> None:
        faults = [
            *_faults_of_tokens(self.tokens, self.log_probs),
            *faults_of_spans(self.spans, len(self.tokens)),
        ]
        if self.reward is not None and not math.isfinite(self.reward):
            faults.append(f"reward {self.reward} is not a number to train on")
        if faults:
            raise RolloutError(f"{self.id} of prompt {self.prompt!r} is not a rollout", faults)

    @property
    def oldest(self) -> PolicyVersion:
        """The version of its oldest token: the rollout's version."""
        return self.spans[0].version

    @property
    def newest(self) -> PolicyVersion:
        """The version of its newest token."""
        return self.spans[-1].version

    def versions(self) -> tuple[PolicyVersion, ...]:
        """[length] the version of each token."""
        return tuple(span.version for span in self.spans for _ in range(span.start, span.end))


class RolloutGroup(msgspec.Struct, frozen=True):
    """All samples of one prompt: what is admitted, buffered and trained as one.

    Invariant: samples `0 .. n - 1` of one serial, in order.

    Attributes:
        serial: of the prompt.
        attempt: how often the prompt had been given out before, from 0.
        rollouts: [samples], at least one.
    """

    serial: Serial
    attempt: int
    rollouts: tuple[Rollout, ...]

    def __post_init__(self) -> None:
        ids = [rollout.id for rollout in self.rollouts]
        expected = [SampleId(self.serial, sample) for sample in range(len(ids))]
        if not ids or ids != expected:
            raise RolloutError(
                f"a group of prompt {self.serial} must hold its samples 0, 1, ... in order; "
                f"got {[(each.serial, each.sample) for each in ids]}"
            )

    @property
    def oldest(self) -> PolicyVersion:
        """The version of its oldest token: the group's version."""
        return min(rollout.oldest for rollout in self.rollouts)

    @property
    def newest(self) -> PolicyVersion:
        """The version of its newest token."""
        return max(rollout.newest for rollout in self.rollouts)


def faults_of_spans(spans: Iterable[VersionSpan], length: int) -> list[str]:
    """Why `spans` do not tile `length` tokens in the order of versions; empty if they do.

    >>> faults_of_spans([VersionSpan(PolicyVersion(3), 0, 2)], 3)
    ['tokens [2, 3) have no version']
    """
    faults: list[str] = []
    at, version = 0, 0
    for span in spans:
        if span.start != at or span.end <= span.start:
            faults.append(f"span [{span.start}, {span.end}) where one from {at} on was expected")
        if span.version < version:
            faults.append(f"version {span.version} after version {version}")
        at, version = span.end, span.version
    if at < length:
        faults.append(f"tokens [{at}, {length}) have no version")
    if at > length:
        faults.append(f"spans reach to {at}, but there are {length} tokens")
    return faults


def _faults_of_tokens(tokens: tuple[int, ...], log_probs: tuple[float, ...]) -> list[str]:
    faults: list[str] = []
    if not tokens:
        faults.append("it holds no token")
    if len(tokens) != len(log_probs):
        faults.append(f"{len(tokens)} tokens, but {len(log_probs)} log-probabilities")
    bad = [i for i, value in enumerate(log_probs) if not math.isfinite(value)]
    if bad:
        faults.append(f"log-probabilities at {bad} are not finite")
    return faults
