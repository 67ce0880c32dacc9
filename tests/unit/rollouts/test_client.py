"""The client: routed by load and version, tried elsewhere, never counted twice, on time."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from tests.unit.rollouts.simulated import SimulatedEngine, spans_are_true
from tests.unit.rollouts.virtual_time import run

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.client import RolloutClient, Route, all_samples
from reshard_trainer.rollouts.clock import Until, now
from reshard_trainer.rollouts.errors import (
    EngineFault,
    EngineFenced,
    RequestRefused,
    RolloutError,
    StaleEngine,
)
from reshard_trainer.rollouts.fleet import Fleet, Seat
from reshard_trainer.rollouts.rollout import (
    EngineName,
    Prompt,
    PromptId,
    Rollout,
    SampleId,
    Serial,
)
from reshard_trainer.rollouts.sampling import Generation, Request, Sampling

V = PolicyVersion
PROMPT = Prompt(PromptId("p"), (1, 2))


def engine(name: str, label: int | None = 0, **more: object) -> SimulatedEngine:
    made = SimulatedEngine(EngineName(name), jitter=0.0, **more)  # type: ignore[arg-type]
    made.label = None if label is None else V(label)
    return made


class Bench:
    """A client of some engines, whose seats know what they serve."""

    def __init__(self, *engines: SimulatedEngine, request_seconds: float = 600.0) -> None:
        self.engines = engines
        self.fleet = Fleet(random.Random(0))
        self.client = RolloutClient(
            self.fleet,
            Sampling(max_tokens=4, seed=3),
            request_seconds=request_seconds,
            chance=random.Random(0),
        )
        for each in engines:
            seat = self.fleet.join(each)
            if each.label is not None:
                self.fleet.refreshed(seat, each.label)

    def seat(self, number: int) -> Seat:
        return self.fleet.seats[number]

    async def samples(
        self, count: int, route: Route | None = None, seconds: float = 1000.0
    ) -> tuple[Rollout, ...]:
        ids = [SampleId(Serial(0), sample) for sample in range(count)]
        until = Until.after(seconds)
        return await all_samples(self.client, ids, PROMPT, route or Route(V(0)), until)


def with_bench(use: Callable[[Bench], Awaitable[object]], *engines: SimulatedEngine) -> object:
    async def whole() -> object:
        return await use(Bench(*engines))

    return run(whole())


def test_load_follows_slots_and_speed() -> None:
    fast = engine("fast", slots=4, token_seconds=1.0)
    slow = engine("slow", slots=2, token_seconds=4.0)

    async def use(bench: Bench) -> Counter[str]:
        made = await bench.samples(36)
        return Counter(rollout.engines[0] for rollout in made)

    made = with_bench(use, fast, slow)
    assert isinstance(made, Counter)
    assert made["fast"] > 6 * made["slow"]
    assert made["slow"] >= 2
    assert fast.most_at_once == 4
    assert slow.most_at_once == 2


def test_stale_fenced_held_and_departed_engines_are_skipped() -> None:
    async def use(bench: Bench) -> set[str]:
        bench.seat(1).fenced = "mixed weights"
        bench.seat(2).held = True
        bench.fleet.leave(EngineName("gone"))
        made = await bench.samples(8, Route(at_least=V(3)))
        return {rollout.engines[0] for rollout in made}

    names = ["stale", "fenced", "held", "gone", "unknown", "good"]
    versions = [2, 3, 3, 3, None, 3]
    engines = [engine(name, label) for name, label in zip(names, versions, strict=True)]
    assert with_bench(use, *engines) == {"good"}
    assert all(each.started == 0 for each in engines[:-1])


def test_no_engine_at_the_version_is_an_error_at_the_deadline_that_names_them_all() -> None:
    async def use(bench: Bench) -> float:
        bench.seat(1).fenced = "mixed weights"
        start = now()
        with pytest.raises(StaleEngine) as caught:
            await bench.samples(1, Route(at_least=V(5)), seconds=50.0)
        assert "at version 5 or newer within 50 s" in str(caught.value)
        assert caught.value.faults == (
            "a serves version 2 and has 0 requests in flight",
            "b serves version 5 and is fenced: mixed weights",
        )
        return now() - start

    assert with_bench(use, engine("a", 2), engine("b", 5)) == 50.0


def test_a_sample_whose_engine_dies_is_made_elsewhere_and_is_the_same() -> None:
    """One of several in flight dies: the sample set is the undisturbed one, each sample once."""
    good = engine("good", token_seconds=1.0)

    async def undisturbed(bench: Bench) -> tuple[Rollout, ...]:
        return await bench.samples(6)

    async def disturbed(bench: Bench) -> tuple[Rollout, ...]:
        asking = asyncio.create_task(bench.samples(6))
        await asyncio.sleep(1.5)
        bench.engines[0].crash()
        return await asking

    first = with_bench(undisturbed, engine("good", token_seconds=1.0))
    second = with_bench(disturbed, engine("bad", token_seconds=1.0), good)
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    assert [(r.id, r.tokens) for r in first] == [(r.id, r.tokens) for r in second]
    retried = [r for r in second if "retried" in r.marks]
    assert retried
    assert all(r.engines == ("good",) for r in second)
    assert all(spans_are_true(r, [good]) for r in second)


def test_an_engine_that_hangs_is_given_up_for_another() -> None:
    async def whole() -> tuple[Rollout, ...]:
        bench = Bench(engine("hung", token_seconds=1e9), engine("good"), request_seconds=30.0)
        return await bench.samples(2)

    made = run(whole(), seconds=200.0)
    assert {r.engines for r in made} == {("good",)}


def test_failures_on_every_engine_are_all_told() -> None:
    async def use(bench: Bench) -> None:
        for each in bench.engines:
            each.crash_share = 1.0
        with pytest.raises(EngineFault, match="failed 4 times") as caught:
            await restored(bench)
        assert len(caught.value.faults) == 4

    async def restored(bench: Bench) -> None:
        """Engines come back at once, and fail again."""
        asking = asyncio.create_task(bench.samples(1))
        while not asking.done():
            await asyncio.sleep(1.0)
            for seat, each in zip(bench.fleet.seats, bench.engines, strict=True):
                each.label, each.down_until = V(0), 0.0
                if seat.version is None:
                    bench.fleet.refreshed(seat, V(0))
        await asking

    with_bench(use, engine("a"), engine("b"))


def test_a_failed_engine_rests_longer_each_time_and_one_outage_counts_once() -> None:
    async def use(bench: Bench) -> None:
        seat = bench.seat(0)
        rests = []
        for _ in range(9):
            for _ in range(5):
                bench.fleet.failed(seat, EngineFault("down"))
            rests.append(seat.rest_until - now())
            await asyncio.sleep(seat.rest_until - now())
        assert seat.failures == 9
        assert rests[0] <= 0.5
        assert all(15.0 <= rest <= 30.0 for rest in rests[-2:])
        bench.fleet.succeeded(seat)
        assert seat.failures == 0

    with_bench(use, engine("a"))


def test_a_fence_goes_up_with_the_engines_own_words_and_down_with_a_refresh() -> None:
    async def use(bench: Bench) -> None:
        seat = bench.seat(0)
        bench.fleet.failed(seat, EngineFenced("mixed weights after a failed commit"))
        assert "is fenced: mixed weights after a failed commit" in str(seat)
        await asyncio.sleep(10.0)
        assert not seat.usable(now())
        bench.fleet.refreshed(seat, V(1))
        assert seat.usable(now())

    with_bench(use, engine("a"))


def test_an_aborted_sample_goes_on_from_its_own_tokens() -> None:
    """Its parts come from two engines and two versions; the spans join."""

    async def use(bench: Bench) -> Rollout:
        asking = asyncio.create_task(bench.samples(1))
        await asyncio.sleep(2.5)
        first = bench.seat(0)
        with bench.fleet.holding(first):
            await first.endpoint.abort(sorted(first.requests), Until.after(10))
            await bench.fleet.drained(first, Until.after(10))
            (rollout,) = await asking
        return rollout

    rollout = with_bench(use, engine("a", 1), engine("b", 2))
    assert isinstance(rollout, Rollout)
    assert rollout.engines == ("a", "b")
    assert rollout.versions() == (1, 1, 2, 2)
    assert rollout.marks == {"resubmitted", "continued"}
    assert len(rollout.tokens) == 4


def test_a_continuation_never_goes_back_to_older_weights() -> None:
    async def use(bench: Bench) -> None:
        asking = asyncio.create_task(bench.samples(1, Route(V(0), home=bench.seat(1)), 100.0))
        await asyncio.sleep(2.5)
        newer = bench.seat(1)
        await newer.endpoint.abort(sorted(newer.requests), Until.after(10))
        newer.held = True
        with pytest.raises(StaleEngine):
            await asking

    with_bench(use, engine("old", 1), engine("new", 2))


def test_kept_kv_blocks_are_marked() -> None:
    async def use(bench: Bench) -> Rollout:
        asking = asyncio.create_task(bench.samples(1))
        await asyncio.sleep(1.5)
        bench.engines[0].label = V(1)
        bench.seat(0).kept_kv.add(V(1))
        (rollout,) = await asking
        return rollout

    rollout = with_bench(use, engine("a"))
    assert isinstance(rollout, Rollout)
    assert rollout.marks == {"continued", "kept_kv"}


class Refusing(SimulatedEngine):
    """Understands the request and will not serve it."""

    async def generate(self, request: Request, until: Until) -> Generation:
        self.started += 1
        raise RequestRefused("the prompt is too long")


def test_a_refused_request_is_not_tried_elsewhere() -> None:
    refusing = Refusing(EngineName("a"), label=V(0))
    other = engine("b")

    async def use(bench: Bench) -> None:
        with pytest.raises(RequestRefused, match="the prompt is too long"):
            await bench.samples(1, Route(V(0), home=bench.seat(0)))

    with_bench(use, refusing, other)
    assert other.started == 0


def test_an_engine_joins_once_and_leaves_once() -> None:
    async def use(bench: Bench) -> None:
        with pytest.raises(RolloutError, match="engine a is in the fleet already"):
            bench.fleet.join(engine("a"))
        bench.fleet.leave(EngineName("a"))
        with pytest.raises(RolloutError, match="engine a is not in the fleet; there are none"):
            bench.fleet.leave(EngineName("a"))

    with_bench(use, engine("a"))


def test_an_engine_that_never_drains_is_an_error() -> None:
    async def use(bench: Bench) -> None:
        seat = bench.seat(0)
        with (
            bench.fleet.using(seat, "r"),
            pytest.raises(EngineFault, match="still works on 1 requests after 5 s"),
        ):
            await bench.fleet.drained(seat, Until.after(5))

    with_bench(use, engine("a"))
