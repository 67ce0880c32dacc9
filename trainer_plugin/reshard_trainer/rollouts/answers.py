"""From what an engine answered to a `Generation`, the same for every kind of engine.

vLLM labels weights with text; a policy version's label is its decimal number.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.errors import EngineFault
from reshard_trainer.rollouts.rollout import EngineName, VersionSpan
from reshard_trainer.rollouts.sampling import Generation


class LabelledSpan(Protocol):
    """vLLM's `WeightVersionSpan`: output tokens `[start, end)` and the weights' label."""

    @property
    def version(self) -> str:
        """The label."""

    @property
    def start(self) -> int:
        """First token."""

    @property
    def end(self) -> int:
        """One past the last token."""


def version_of_label(label: str) -> PolicyVersion | None:
    """The version that a label names; None for any other label, such as vLLM's `default`.

    >>> version_of_label("12"), version_of_label("default"), version_of_label("-1")
    (12, None, None)
    """
    return PolicyVersion(int(label)) if label.isascii() and label.isdigit() else None


def generation(
    engine: EngineName,
    *,
    tokens: Sequence[int],
    log_probs: Sequence[float | None],
    spans: Iterable[LabelledSpan] | None,
    finish: str | None,
) -> Generation:
    """One engine's answer, checked as far as one answer can be.

    Raises:
        EngineFault: it is not a complete answer.
    """
    missing = [i for i, value in enumerate(log_probs) if value is None]
    if missing or len(log_probs) != len(tokens):
        raise EngineFault(
            f"engine {engine} has log-probabilities of {len(log_probs) - len(missing)} tokens but "
            f"sampled {len(tokens)} (missing at {missing}); its weights may hold NaN"
        )
    if spans is None and tokens:
        raise EngineFault(f"engine {engine} does not say which weights sampled the tokens")
    if finish not in ("stop", "length", "abort"):
        raise EngineFault(f"engine {engine} ended a request for the reason {finish!r}")
    return Generation(
        tokens=tuple(tokens),
        log_probs=tuple(value for value in log_probs if value is not None),
        spans=_spans(engine, spans or ()),
        finish=finish,  # type: ignore[arg-type]  # mypy does not narrow `str` by `in`
    )


def _spans(engine: EngineName, labelled: Iterable[LabelledSpan]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    for span in labelled:
        version = version_of_label(span.version)
        if version is None:
            raise EngineFault(
                f"engine {engine} serves weights labelled {span.version!r}, which is no policy "
                "version: publish to it before it samples"
            )
        # A label that changed without a token in between leaves an empty span.
        if span.end > span.start:
            spans.append(VersionSpan(version, span.start, span.end))
    return tuple(spans)
