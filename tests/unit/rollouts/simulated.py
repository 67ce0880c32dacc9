"""Simulated engines and a simulated trainer, on the event loop's clock.

A simulated engine samples tokens that follow from the request's seed, the token's position and the
version that it serves at that moment, and notes which version it really used.
"""

import asyncio
import hashlib
import random
from collections.abc import Collection
from dataclasses import dataclass, field

from reshard.errors import EngineError
from reshard.ids import PolicyVersion
from reshard_trainer.engines import InFlight
from reshard_trainer.rollouts.clock import Until, now
from reshard_trainer.rollouts.errors import EngineFault
from reshard_trainer.rollouts.refresh import Boundary, Refreshed
from reshard_trainer.rollouts.rollout import (
    EngineName,
    Prompt,
    PromptId,
    Rollout,
    SampleId,
    Serial,
    VersionSpan,
)
from reshard_trainer.rollouts.sampling import Generation, Request

VOCAB = 50
FIRST = PolicyVersion(0)


def token_of(seed: int, position: int, version: int) -> int:
    """What an engine samples."""
    text = f"{seed}/{position}/{version}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) % VOCAB


@dataclass(eq=False)
class SimulatedEngine:
    """An engine that serves `slots` requests at once; others wait in its queue.

    Attributes:
        token_seconds: of one token of one request.
        jitter: how much that varies, as a share.
        crash_share: probability that a token takes the engine down.
        down_seconds: how long it is down then; its weights are lost.
        label: the version it serves; None: vLLM's `default`.
        used: the version that really sampled each token: by sample and position, last try.
    """

    name: EngineName
    slots: int = 4
    token_seconds: float = 1.0
    jitter: float = 0.5
    crash_share: float = 0.0
    down_seconds: float = 10.0
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    label: PolicyVersion | None = None
    down_until: float = 0.0
    started: int = 0
    most_at_once: int = 0
    held: bool = False
    used: dict[tuple[SampleId, int], PolicyVersion] = field(default_factory=dict)
    closed: bool = False

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.slots)
        self._aborted: set[str] = set()
        self._at_once = 0

    async def check(self, until: Until) -> None:
        pass

    async def version(self, until: Until) -> PolicyVersion | None:
        self._raise_if_down()
        return self.label

    async def close(self) -> None:
        self.closed = True

    async def abort(self, requests: Collection[str], until: Until) -> None:
        self._raise_if_down()
        self._aborted.update(requests)

    async def generate(self, request: Request, until: Until) -> Generation:
        self.started += 1
        try:
            async with until.limit(), self._room:
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
                try:
                    return await self._sample(request)
                finally:
                    self._at_once -= 1
        except TimeoutError as error:
            raise EngineFault(f"{self.name} is too slow") from error

    async def _sample(self, request: Request) -> Generation:
        tokens: list[int] = []
        versions: list[PolicyVersion] = []
        start = request.sampling.max_tokens - request.max_tokens
        for position in range(request.max_tokens):
            share = 1 + self.jitter * self.chance.uniform(-1, 1)
            await asyncio.sleep(self.token_seconds * share)
            if self.chance.random() < self.crash_share:
                self.crash()
            self._raise_if_down()
            if request.name in self._aborted:
                return _answer(tokens, versions, "abort")
            if self.label is None:
                raise EngineFault(f"{self.name} serves weights labelled 'default'")
            versions.append(self.label)
            tokens.append(token_of(request.seed, position, self.label))
            self.used[request.sample, start + position] = self.label
        return _answer(tokens, versions, "length")

    def crash(self) -> None:
        self.label = None
        self.down_until = now() + self.down_seconds

    def _raise_if_down(self) -> None:
        if now() < self.down_until:
            raise EngineFault(f"{self.name} is down")


def _answer(tokens: list[int], versions: list[PolicyVersion], finish: str) -> Generation:
    spans: list[VersionSpan] = []
    for i, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, i + 1)
        else:
            spans.append(VersionSpan(version, i, i + 1))
    log_probs = tuple(-0.1 - token / 100 for token in tokens)
    assert finish in ("length", "abort")
    return Generation(tuple(tokens), log_probs, tuple(spans), finish)  # type: ignore[arg-type]


@dataclass(eq=False)
class SimulatedTrainer:
    """Publishes versions, and brings engines to the newest one: a refresher.

    Attributes:
        refresh_seconds: by engine, of the transfer; its link's speed.
        failure_share: probability that a refresh fails.
        installed: (engine, version) in order.
    """

    engines: dict[EngineName, SimulatedEngine]
    refresh_seconds: dict[EngineName, float] = field(default_factory=dict)
    commit_seconds: float = 0.1
    failure_share: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    published: PolicyVersion = FIRST
    installed: list[tuple[EngineName, PolicyVersion]] = field(default_factory=list)
    can: Collection[InFlight] = frozenset[InFlight](("keep", "wait", "abort"))

    async def refresh(
        self, engine: EngineName, at_least: PolicyVersion, boundary: Boundary, until: Until
    ) -> Refreshed:
        end = self.engines[engine]
        version = self.published
        if end.label is not None and end.label >= at_least:
            return Refreshed(end.label)
        await asyncio.sleep(self.refresh_seconds.get(engine, 1.0))
        if now() < end.down_until or self.chance.random() < self.failure_share:
            raise EngineError(f"{engine} was not reached")
        async with boundary:
            await asyncio.sleep(self.commit_seconds)
            end.label = version
        self.installed.append((engine, version))
        return Refreshed(version)


class Prompts:
    """A stream of `length` prompts (None: without end), each of another name."""

    def __init__(self, length: int | None = None) -> None:
        self._length = length

    def prompt(self, serial: Serial) -> Prompt | None:
        if self._length is not None and serial >= self._length:
            return None
        return Prompt(PromptId(f"p{serial}"), (1 + serial % 7, 2, 3))


def spans_are_true(rollout: Rollout, engines: Collection[SimulatedEngine]) -> bool:
    """Whether some engine really used the versions that the spans claim, token by token."""
    return all(
        any(engine.used.get((rollout.id, i)) == version for engine in engines)
        for i, version in enumerate(rollout.versions())
    )
