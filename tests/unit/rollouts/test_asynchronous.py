"""Asynchronous runs on a virtual clock, with random delays and failures."""

import asyncio
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rollouts.runs import Scenario, drive, steps
from tests.unit.rollouts.simulated import Prompts, SimulatedEngine, spans_are_true
from tests.unit.rollouts.virtual_time import Deadlock, run

from reshard.errors import DeadlineExceeded
from reshard.ids import PolicyVersion
from reshard.wire import decode, encode
from reshard_trainer.engines import InFlight
from reshard_trainer.rollouts.buffer import Batch
from reshard_trainer.rollouts.desk import SavedDesk
from reshard_trainer.rollouts.errors import PromptsExhausted, RolloutError
from reshard_trainer.rollouts.rollout import EngineName, Prompt, Rollout
from reshard_trainer.rollouts.sequential import SequentialRollouts, batch_of
from reshard_trainer.rollouts.staleness import StalenessBound

V = PolicyVersion


def engines_of(draw: st.DrawFn, *, crash: bool) -> list[SimulatedEngine]:
    return [
        SimulatedEngine(
            EngineName(f"e{i}"),
            slots=draw(st.integers(1, 6)),
            token_seconds=draw(st.sampled_from([0.1, 1.0, 10.0])),
            jitter=draw(st.sampled_from([0.0, 0.9])),
            crash_share=draw(st.sampled_from([0.0, 0.01])) if crash else 0.0,
            chance=random.Random(draw(st.integers(0, 1000))),
        )
        for i in range(draw(st.integers(1, 3)))
    ]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    staleness = draw(st.integers(0, 4))
    engines = engines_of(draw, crash=True)
    return Scenario(
        bound=StalenessBound(
            batch=draw(st.integers(1, 4)),
            max_staleness=staleness,
            publish_every=draw(st.integers(1, staleness + 1)),
        ),
        steps=draw(st.integers(1, 8)),
        step_seconds=draw(st.sampled_from([0.1, 5.0, 40.0])),
        engines=engines,
        refresh_seconds={e.name: draw(st.sampled_from([0.1, 5.0, 40.0])) for e in engines},
        refresh_failures=draw(st.sampled_from([0.0, 0.2])),
        in_flight=draw(st.sampled_from(["keep", "wait", "abort"])),
        samples=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1000)),
    )


def check_invariants(scenario: Scenario, batches: list[Batch]) -> None:
    bound = scenario.bound
    for version, batch in enumerate(batches):
        assert batch.version == version
        assert len(batch.groups) == bound.batch
        for taken in batch.groups:
            assert 0 <= version - taken.oldest <= bound.max_staleness
            assert taken.newest <= version
            assert len(taken.rollouts) == scenario.samples
            for rollout in taken.rollouts:
                assert spans_are_true(rollout, scenario.engines)
                assert len(rollout.tokens) == scenario.tokens
    serials = [taken.serial for batch in batches for taken in batch.groups]
    assert len(serials) == len(set(serials))


@settings(max_examples=50, deadline=None)
@given(scenarios())
def test_every_trained_rollout_is_within_the_bound_and_counted_once(scenario: Scenario) -> None:
    outcome = run(drive(scenario), seconds=1e7)
    check_invariants(scenario, outcome.batches)
    counters = outcome.rollouts.service.desk.counters
    assert counters.rejected == 0
    assert counters.dropped == 0
    limit = scenario.bound.admitted(V(scenario.steps))
    assert counters.accepted - counters.evicted_waiting <= limit
    for engine in scenario.engines:
        assert engine.most_at_once <= engine.slots


@settings(max_examples=25, deadline=None)
@given(scenarios(), st.data())
def test_a_resumed_run_replays_and_skips_no_prompt(scenario: Scenario, data: st.DataObject) -> None:
    """Trainer and engines stop somewhere, also between taking a batch and making its step."""
    total = scenario.steps + 3
    scenario.prompts = total * scenario.bound.batch
    stop = data.draw(st.integers(0, scenario.steps))
    untrained = data.draw(st.booleans())

    async def both() -> list[Batch]:
        trainer = scenario.trainer()
        first = scenario.rollouts(trainer)
        await first.join(*scenario.engines)
        batches = await steps(scenario, first, trainer, 0, stop)
        if untrained and stop < total:
            await first.take(V(stop), scenario.patience)
        saved = decode(encode(first.save(V(stop))), SavedDesk)
        await first.close()
        for engine in scenario.engines:
            engine.label = None
        trainer.published = V(stop)
        second = scenario.rollouts(trainer, saved)
        desk = second.service.desk
        assert desk.next_step == stop
        assert desk.buffered + desk.running <= scenario.bound.admitted(V(stop)) - (
            stop * scenario.bound.batch
        )
        await second.join(*scenario.engines)
        batches += await steps(scenario, second, trainer, stop, total)
        with pytest.raises(PromptsExhausted):
            await second.take(V(total), scenario.patience)
        await second.close()
        return batches

    batches = run(both(), seconds=1e7)
    check_invariants(scenario, batches)
    serials = sorted(taken.serial for batch in batches for taken in batch.groups)
    assert serials == list(range(total * scenario.bound.batch))


@st.composite
def strict_scenarios(draw: st.DrawFn) -> Scenario:
    engines = engines_of(draw, crash=draw(st.booleans()))
    return Scenario(
        bound=StalenessBound(batch=draw(st.integers(1, 4)), max_staleness=0),
        steps=draw(st.integers(1, 5)),
        engines=engines,
        samples=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1000)),
        in_flight=draw(st.sampled_from(["keep", "wait", "abort"])),
    )


async def sequential(scenario: Scenario) -> list[set[object]]:
    """The same steps in sequential mode."""
    trainer = scenario.trainer()
    rollouts = SequentialRollouts(trainer, scenario.how())
    await rollouts.join(*scenario.engines)
    sets: list[set[object]] = []
    for version in range(scenario.steps):
        trainer.published = V(version)
        prompts = batch_of(Prompts(), scenario.bound, V(version))
        groups = await rollouts.generate(prompts, min_version=V(version), seconds=1e6)
        sets.append({sample for each in groups for sample in map(identity, each.rollouts)})
        await asyncio.sleep(scenario.step_seconds)
    await rollouts.close()
    return sets


def identity(rollout: Rollout) -> object:
    """All of a rollout that the protocol fixes: not who made it, nor what went wrong before."""
    return encode(msgspec.structs.replace(rollout, engines=(), marks=frozenset()))


@settings(max_examples=25, deadline=None)
@given(strict_scenarios())
def test_without_staleness_the_samples_are_those_of_sequential_mode(scenario: Scenario) -> None:
    outcome = run(drive(scenario), seconds=1e7)
    sets = [
        {identity(rollout) for taken in batch.groups for rollout in taken.rollouts}
        for batch in outcome.batches
    ]
    for engine in scenario.engines:
        engine.__post_init__()
        engine.label, engine.down_until = None, 0.0
    assert sets == run(sequential(scenario), seconds=1e7)
    for version, batch in enumerate(outcome.batches):
        for taken in batch.groups:
            assert (taken.oldest, taken.newest) == (version, version)
            assert all(len(rollout.spans) == 1 for rollout in taken.rollouts)


def engine(name: str, **more: object) -> SimulatedEngine:
    return SimulatedEngine(EngineName(name), **more)  # type: ignore[arg-type]


def test_stragglers_are_evicted_counted_and_do_not_hold_up_the_trainer() -> None:
    """A slow engine's groups grow too old while they run."""

    def scenario(*engines: SimulatedEngine) -> Scenario:
        return Scenario(StalenessBound(4, 1), steps=20, engines=list(engines))

    alone = run(drive(scenario(engine("fast", slots=8))))
    slow = engine("slow", slots=2, token_seconds=1000.0)
    both = run(drive(scenario(engine("fast", slots=8), slow)))
    counters = both.rollouts.service.desk.counters
    assert counters.evicted_running > 0
    assert slow.started > 0
    assert all("slow" not in r.engines for b in both.batches for g in b.groups for r in g.rollouts)
    # Simulated seconds: no machine's speed is in them.
    assert both.seconds <= 1.2 * alone.seconds + 20
    numbers = both.rollouts.meter.registry
    evicted = numbers.get_sample_value("reshard_groups_total", {"outcome": "evicted_running"})
    assert evicted == counters.evicted_running


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_no_prompt_starves(max_staleness: int) -> None:
    """Beside an engine that is always too slow and one that crashes: asked again, oldest first."""
    chance = random.Random(1)
    fast = SimulatedEngine(
        EngineName("fast"), slots=4, token_seconds=0.5, jitter=0.9, crash_share=0.01, chance=chance
    )
    slow = SimulatedEngine(
        EngineName("slow"), slots=4, token_seconds=1000.0, jitter=0.9, chance=chance
    )
    bound = StalenessBound(batch=3, max_staleness=max_staleness)
    engines = [fast, slow]
    refresh = {engine.name: 0.1 for engine in engines}
    scenario = Scenario(bound, steps=40, engines=engines, refresh_seconds=refresh)
    outcome = run(drive(scenario), seconds=1e7)
    # A prompt's turn is the step that would train it, if all were answered in order.
    longest = 6 * (max_staleness + 1)
    for version, batch in enumerate(outcome.batches):
        for taken in batch.groups:
            assert version - taken.serial // bound.batch <= longest
    trained = set(outcome.serials)
    assert all(serial in trained for serial in range((scenario.steps - longest) * bound.batch))


def test_a_slow_link_holds_up_nobody_and_skips_versions() -> None:
    """An engine whose transfers take ten steps lags on its own, and jumps to the newest version."""

    def scenario(*engines: SimulatedEngine) -> Scenario:
        return Scenario(
            StalenessBound(4, 30),
            steps=60,
            engines=list(engines),
            refresh_seconds={EngineName("far"): 50.0},
        )

    alone = run(drive(scenario(engine("near", slots=8))))
    far = engine("far", slots=2)
    planned = scenario(engine("near", slots=8), far)
    both = run(drive(planned))
    assert both.seconds <= alone.seconds + 1
    assert any("far" in r.engines for b in both.batches for g in b.groups for r in g.rollouts)
    lag = both.rollouts.meter.registry.get_sample_value(
        "reshard_publish_lag_versions_sum", {"engine": "far"}
    )
    assert lag is not None
    assert lag > 0


def test_versions_that_are_overtaken_are_never_installed() -> None:
    far = engine("far", slots=4)
    scenario = Scenario(
        StalenessBound(1, 40), steps=40, step_seconds=1.0, engines=[far],
        refresh_seconds={EngineName("far"): 7.0},
    )  # fmt: skip

    async def installed() -> list[int]:
        trainer = scenario.trainer()
        rollouts = scenario.rollouts(trainer)
        await rollouts.join(far)
        await steps(scenario, rollouts, trainer, 0, 40)
        await rollouts.close()
        return [int(version) for _, version in trainer.installed]

    versions = run(installed())
    assert versions == sorted(set(versions))
    assert len(versions) < 30


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_what_becomes_of_running_requests(in_flight: str) -> None:
    scenario = Scenario(
        StalenessBound(2, 4),
        steps=12,
        step_seconds=3.0,
        tokens=12,
        engines=[engine("e", slots=4)],
        in_flight=in_flight,  # type: ignore[arg-type]
    )
    outcome = run(drive(scenario))
    check_invariants(scenario, outcome.batches)
    found = [r for batch in outcome.batches for each in batch.groups for r in each.rollouts]
    marks = {mark for rollout in found for mark in rollout.marks}
    if in_flight == "wait":
        assert marks == set()
        assert all(len(rollout.spans) == 1 for rollout in found)
    elif in_flight == "keep":
        assert marks == {"continued"}
    else:
        assert "resubmitted" in marks


def test_engines_join_and_leave_in_mid_run() -> None:
    first, second = engine("first", slots=2), engine("second", slots=2)
    scenario = Scenario(StalenessBound(2, 2), engines=[first, second], steps=10)

    async def change() -> tuple[list[Batch], list[Batch], list[Batch]]:
        trainer = scenario.trainer()
        rollouts = scenario.rollouts(trainer)
        await rollouts.join(first)
        one = await steps(scenario, rollouts, trainer, 0, 4)
        await rollouts.join(second)
        two = await steps(scenario, rollouts, trainer, 4, 10)
        await rollouts.leave(first.name)
        three = await steps(scenario, rollouts, trainer, 10, 20)
        await rollouts.close()
        return one, two, three

    one, two, three = run(change())
    check_invariants(scenario, one + two + three)

    def who(batches: list[Batch]) -> set[str]:
        return {e for b in batches for g in b.groups for r in g.rollouts for e in r.engines}

    assert who(one) == {"first"}
    assert who(two) == {"first", "second"}
    assert who(three[4:]) == {"second"}
    assert first.closed


def test_a_replaced_engine_gets_weights_before_it_serves() -> None:
    """It fails in mid-run, comes back with the weights it was started on, and is refreshed."""
    only = engine("e", slots=2)
    scenario = Scenario(StalenessBound(2, 1), engines=[only])

    async def crash() -> list[Batch]:
        trainer = scenario.trainer()
        rollouts = scenario.rollouts(trainer)
        await rollouts.join(only)
        batches = await steps(scenario, rollouts, trainer, 0, 3)
        only.crash()
        batches += await steps(scenario, rollouts, trainer, 3, 6)
        await rollouts.close()
        return batches

    check_invariants(scenario, run(crash()))


def test_a_batch_that_does_not_come_is_an_error_that_says_what_is_missing() -> None:
    scenario = Scenario(
        StalenessBound(2, 0), engines=[engine("e", token_seconds=1e9)], patience=100.0
    )
    with pytest.raises(
        DeadlineExceeded, match="batch of version 0 was not complete within 100 s: 0 groups wait, 2"
    ):
        run(drive(scenario))


def test_a_failing_reward_costs_the_prompt_not_the_run() -> None:
    async def judge(prompt: Prompt, rollout: Rollout) -> float:
        if prompt.name == "p1":
            raise ValueError("cannot be judged")
        return 1.0

    scenario = Scenario(
        StalenessBound(1, 0), engines=[engine("e")], steps=3, max_charges=2, reward=judge
    )
    outcome = run(drive(scenario))
    assert outcome.serials == [0, 2, 3]
    assert outcome.rollouts.service.desk.counters.dropped == 1


def test_a_refresher_that_cannot_abort_is_refused() -> None:
    scenario = Scenario(StalenessBound(1, 0), in_flight="abort")
    trainer = scenario.trainer()
    trainer.can = frozenset[InFlight](("keep",))

    async def make() -> None:
        scenario.rollouts(trainer)

    with pytest.raises(RolloutError, match="in_flight='abort' cannot be had with SimulatedTr"):
        run(make())


def test_the_virtual_clock_notices_a_deadlock() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    with pytest.raises((Deadlock, TimeoutError)):
        run(stuck())
