"""Sequential pull: fresh before it samples, one version a call, never older weights."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rollouts.simulated import (
    Prompts,
    SimulatedEngine,
    SimulatedTrainer,
    spans_are_true,
)
from tests.unit.rollouts.virtual_time import run

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.clock import now
from reshard_trainer.rollouts.errors import StaleEngine
from reshard_trainer.rollouts.generating import Generating
from reshard_trainer.rollouts.reward import immediate
from reshard_trainer.rollouts.rollout import EngineName, Prompt, Rollout, RolloutGroup
from reshard_trainer.rollouts.sampling import Sampling
from reshard_trainer.rollouts.sequential import Refresh, SequentialRollouts, batch_of
from reshard_trainer.rollouts.staleness import StalenessBound

V = PolicyVersion
BOUND = StalenessBound(batch=6, max_staleness=0)


def score(prompt: Prompt, rollout: Rollout) -> float:
    return float(len(rollout.tokens))


def engine(name: str, **more: object) -> SimulatedEngine:
    return SimulatedEngine(EngineName(name), **more)  # type: ignore[arg-type]


class Bench:
    """Sequential rollouts over some engines."""

    def __init__(self, *engines: SimulatedEngine, refresh: Refresh = "request") -> None:
        self.engines = engines
        self.trainer = SimulatedTrainer({each.name: each for each in engines})
        how = Generating(
            Sampling(max_tokens=4),
            immediate(score),
            samples=2,
            attempts=1000,
            chance=random.Random(0),
        )
        self.rollouts = SequentialRollouts(self.trainer, how, refresh=refresh)

    async def generate(
        self, version: int, *, seconds: float = 1000.0, refresh: Refresh | None = None
    ) -> tuple[RolloutGroup, ...]:
        prompts = batch_of(Prompts(), BOUND, V(version))
        return await self.rollouts.generate(
            prompts, min_version=V(version), seconds=seconds, refresh=refresh
        )


def with_bench(
    use: Callable[[Bench], Awaitable[object]],
    *engines: SimulatedEngine,
    refresh: Refresh = "request",
) -> object:
    async def whole() -> object:
        bench = Bench(*engines, refresh=refresh)
        await bench.rollouts.join(*engines)
        try:
            return await use(bench)
        finally:
            await bench.rollouts.close()

    return run(whole())


def check(groups: tuple[RolloutGroup, ...], version: int, bench: Bench) -> None:
    assert [each.serial for each in groups] == list(range(version * 6, version * 6 + 6))
    for each in groups:
        assert len(each.rollouts) == 2
        for rollout in each.rollouts:
            assert rollout.versions() == (version,) * 4
            assert rollout.reward == 4.0
            assert spans_are_true(rollout, bench.engines)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_call_is_answered_by_one_version(data: st.DataObject) -> None:
    """Engines differ, fail and come back; whatever happens, a call has one version, the newest."""
    engines = [
        engine(
            f"e{i}",
            slots=data.draw(st.integers(1, 5)),
            token_seconds=data.draw(st.sampled_from([0.1, 1.0, 7.0])),
            crash_share=data.draw(st.sampled_from([0.0, 0.01])),
            chance=random.Random(data.draw(st.integers(0, 99))),
        )
        for i in range(data.draw(st.integers(1, 3)))
    ]
    modes: list[Refresh] = ["always", "request"]
    how = data.draw(st.sampled_from(modes))

    async def use(bench: Bench) -> None:
        bench.trainer.failure_share = 0.2
        for version in range(4):
            bench.trainer.published = V(version)
            check(await bench.generate(version, seconds=1e6), version, bench)

    with_bench(use, *engines, refresh=how)


def test_request_refreshes_only_what_is_stale_and_always_asks_every_time() -> None:
    async def use(bench: Bench) -> list[int]:
        calls = []
        asked = 0
        plain = bench.trainer.refresh

        async def counted(*arguments: object) -> object:
            nonlocal asked
            asked += 1
            return await plain(*arguments)  # type: ignore[arg-type]

        bench.trainer.refresh = counted  # type: ignore[method-assign,assignment]
        for refresh in ("request", "request", "always"):
            before = asked
            await bench.generate(0, refresh=refresh)
            calls.append(asked - before)
        return calls

    assert with_bench(use, engine("e")) == [1, 0, 1]


def test_an_engine_that_cannot_be_refreshed_is_an_error_never_older_weights() -> None:
    only = engine("e")

    async def use(bench: Bench) -> float:
        await bench.generate(0)
        bench.trainer.published = V(1)
        bench.trainer.failure_share = 1.0
        before, start = only.started, now()
        with pytest.raises(StaleEngine, match="version 1 or newer within 60 s") as caught:
            await bench.generate(1, seconds=60.0)
        (fault,) = caught.value.faults
        assert fault.startswith("e serves version 0 and could not be refreshed")
        assert fault.endswith("times in a row: e was not reached")
        assert only.started == before
        return now() - start

    assert with_bench(use, only) == pytest.approx(60.0)


def test_without_refreshing_a_call_waits_for_whoever_publishes() -> None:
    only = engine("e")

    async def use(bench: Bench) -> None:
        asking = asyncio.create_task(bench.generate(1, refresh="off"))
        await asyncio.sleep(5.0)
        assert only.started == 0
        only.label = V(1)
        check(await asking, 1, bench)
        assert bench.trainer.installed == []
        with pytest.raises(StaleEngine):
            await bench.generate(2, refresh="off", seconds=20.0)

    with_bench(use, only)


def test_weights_that_change_in_mid_call_start_it_over_at_the_newer_version() -> None:
    """Somebody publishes to all engines while they sample: no call mixes versions."""

    async def use(bench: Bench) -> set[int]:
        asking = asyncio.create_task(bench.generate(0))
        await asyncio.sleep(4.0)
        for each in bench.engines:
            each.label = V(1)
        groups = await asking
        return {v for each in groups for r in each.rollouts for v in r.versions()}

    assert with_bench(use, engine("a", slots=2), engine("b", slots=3)) == {1}


def test_an_engine_that_lags_takes_no_part() -> None:
    """One of two is at the version: it answers alone."""
    slow = engine("slow")

    async def use(bench: Bench) -> set[str]:
        bench.trainer.refresh_seconds[slow.name] = 1e5
        groups = await bench.generate(0)
        return {name for each in groups for r in each.rollouts for name in r.engines}

    assert with_bench(use, engine("quick"), slow) == {"quick"}
    assert slow.started == 0


def test_a_replacement_takes_over_what_a_dead_engine_had() -> None:
    dying, good = engine("dying", down_seconds=1e9), engine("good")

    async def use(bench: Bench) -> None:
        asking = asyncio.create_task(bench.generate(0))
        await asyncio.sleep(2.5)
        dying.crash()
        check(await asking, 0, bench)

    with_bench(use, dying, good)


def test_engines_leave_between_calls() -> None:
    first, second = engine("first"), engine("second")

    async def use(bench: Bench) -> None:
        await bench.rollouts.leave(first.name)
        check(await bench.generate(0), 0, bench)
        assert first.started == 0
        assert first.closed

    with_bench(use, first, second)


def test_no_prompts_need_no_engine() -> None:
    async def use(bench: Bench) -> object:
        return await bench.rollouts.generate({}, min_version=V(9), seconds=1.0)

    assert with_bench(use) == ()
