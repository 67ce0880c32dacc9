"""Short ways to make rollouts in tests."""

from collections.abc import Sequence

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.rollout import (
    PromptId,
    Rollout,
    RolloutGroup,
    SampleId,
    Serial,
    VersionSpan,
)


def spans(*versions_and_lengths: tuple[int, int]) -> tuple[VersionSpan, ...]:
    """Spans that follow each other: (version, number of tokens)."""
    made: list[VersionSpan] = []
    at = 0
    for version, length in versions_and_lengths:
        made.append(VersionSpan(PolicyVersion(version), at, at + length))
        at += length
    return tuple(made)


def rollout(serial: int, sample: int, versions: Sequence[int]) -> Rollout:
    """A rollout with one token of each version."""
    return Rollout(
        id=SampleId(Serial(serial), sample),
        prompt=PromptId(f"p{serial}"),
        prompt_tokens=(1, 2),
        tokens=tuple(range(len(versions))),
        log_probs=(-0.5,) * len(versions),
        spans=spans(*((version, 1) for version in versions)),
        finish="stop",
        reward=1.0,
    )


def group(serial: int, version: int, *, attempt: int = 0, samples: int = 1) -> RolloutGroup:
    """A group that one version generated."""
    return RolloutGroup(
        Serial(serial),
        attempt,
        tuple(rollout(serial, sample, [version]) for sample in range(samples)),
    )
