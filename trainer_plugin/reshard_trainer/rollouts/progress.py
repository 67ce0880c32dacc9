"""A sample while it is made: from one answer, or from several that continue each other.

Pure values. Not here: who is asked (`client.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.rollout import (
    EngineName,
    Mark,
    Prompt,
    Rollout,
    SampleId,
    VersionSpan,
)
from reshard_trainer.rollouts.sampling import Generation, Request, Sampling

NOTHING: Final = Generation((), (), (), "abort")
"""Before the first answer."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is there of one sample.

    Attributes:
        id: which sample.
        prompt: what is continued.
        sampling: the run's settings.
        so_far: tokens, log-probabilities and spans, in tokens of the whole sample.
        engines: that took part.
        marks: what happened.
    """

    id: SampleId
    prompt: Prompt
    sampling: Sampling
    so_far: Generation = NOTHING
    engines: tuple[EngineName, ...] = ()
    marks: frozenset[Mark] = frozenset()

    @property
    def finished(self) -> bool:
        """Whether it ended by itself or by the limit of tokens."""
        full = len(self.so_far.tokens) >= self.sampling.max_tokens
        return bool(self.so_far.tokens) and (full or self.so_far.finish != "abort")

    @property
    def newest(self) -> PolicyVersion | None:
        """Version of its last token so far."""
        return self.so_far.spans[-1].version if self.so_far.spans else None

    def request(self, name: str) -> Request:
        """What to ask for next, under this name."""
        done = len(self.so_far.tokens)
        return Request(
            sample=self.id,
            tokens=(*self.prompt.tokens, *self.so_far.tokens),
            max_tokens=self.sampling.max_tokens - done,
            seed=self.sampling.seed_of(self.id, done),
            sampling=self.sampling,
            name=name,
        )

    def mark(self, *marks: Mark) -> "Progress":
        """The same, marked."""
        return replace(self, marks=self.marks | set(marks))

    def start_over(self) -> "Progress":
        """Forget the tokens; the marks stay."""
        return replace(self, so_far=NOTHING, engines=())

    def add(
        self, answer: Generation, engine: EngineName, kept_kv: Iterable[PolicyVersion] = ()
    ) -> "Progress":
        """Go on by one answer.

        Args:
            answer: to `request()`.
            engine: whose it is.
            kept_kv: versions that the engine took while it kept older KV blocks.
        """
        start = len(self.so_far.tokens)
        marks: set[Mark] = set(self.marks)
        if start and answer.tokens:
            marks.add("resubmitted")
        if {span.version for span in answer.spans[1:]} & set(kept_kv):
            marks.add("kept_kv")
        spans = join_spans(self.so_far.spans, answer.spans, start)
        if len(spans) > 1:
            marks.add("continued")
        engines = self.engines
        if answer.tokens and engine not in engines[-1:]:
            engines = (*engines, engine)
        return replace(
            self,
            so_far=Generation(
                (*self.so_far.tokens, *answer.tokens),
                (*self.so_far.log_probs, *answer.log_probs),
                spans,
                answer.finish,
            ),
            engines=engines,
            marks=frozenset(marks),
        )

    def rollout(self) -> Rollout:
        """The finished sample.

        Raises:
            RolloutError: the answers do not fit together.
        """
        finish = "length" if self.so_far.finish == "abort" else self.so_far.finish
        return Rollout(
            id=self.id,
            prompt=self.prompt.name,
            prompt_tokens=self.prompt.tokens,
            tokens=self.so_far.tokens,
            log_probs=self.so_far.log_probs,
            spans=self.so_far.spans,
            finish=finish,
            engines=self.engines,
            marks=self.marks,
        )


def join_spans(
    first: tuple[VersionSpan, ...], second: tuple[VersionSpan, ...], start: int
) -> tuple[VersionSpan, ...]:
    """The spans of a continuation behind those before it; equal versions that touch become one.

    >>> one, two = VersionSpan(PolicyVersion(1), 0, 2), VersionSpan(PolicyVersion(1), 0, 3)
    >>> join_spans((one,), (two,), 2)
    (VersionSpan(version=1, start=0, end=5),)
    """
    joined = list(first)
    for span in second:
        moved = VersionSpan(span.version, span.start + start, span.end + start)
        if joined and joined[-1].version == span.version and joined[-1].end == moved.start:
            moved = VersionSpan(span.version, joined.pop().start, moved.end)
        joined.append(moved)
    return tuple(joined)
