"""What sizing predicts, against the real gate, buffer and producers on a virtual clock."""

import asyncio
import json
from dataclasses import dataclass, replace

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rollouts.runs import Scenario, steps
from tests.unit.rollouts.simulated import Prompts, SimulatedEngine
from tests.unit.rollouts.virtual_time import run

from reshard.errors import ReshardError
from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.clock import now
from reshard_trainer.rollouts.rollout import EngineName
from reshard_trainer.rollouts.sequential import SequentialRollouts, batch_of
from reshard_trainer.rollouts.staleness import StalenessBound
from reshard_trainer.sizing import EngineSpeed, Workload, simulate, size
from reshard_trainer.sizing.command import command

TOKENS = 5


@dataclass
class Measured:
    """Of a run of the real parts."""

    step_seconds: float
    trainer_busy: float


def scenario_of(workload: Workload, max_staleness: int, count: int) -> Scenario:
    engines = [
        SimulatedEngine(
            EngineName(f"e{number}"),
            slots=speed.slots,
            token_seconds=speed.group_seconds / TOKENS,
            jitter=0.6,
        )
        for number, speed in enumerate(workload.engines)
    ]
    return Scenario(
        StalenessBound(workload.batch, max_staleness, workload.publish_every),
        steps=count,
        step_seconds=workload.step_seconds,
        engines=engines,
        refresh_seconds={
            engine.name: speed.transfer_seconds
            for engine, speed in zip(engines, workload.engines, strict=True)
        },
        tokens=TOKENS,
    )


def measure(workload: Workload, max_staleness: int, *, warm: int = 12, count: int = 48) -> Measured:
    """Asynchronous mode, really."""
    scenario = scenario_of(workload, max_staleness, count)

    async def whole() -> Measured:
        trainer = scenario.trainer()
        trainer.commit_seconds = max(speed.pause_seconds for speed in workload.engines)
        rollouts = scenario.rollouts(trainer)
        await rollouts.join(*scenario.engines)
        await steps(scenario, rollouts, trainer, 0, warm)
        start = now()
        await steps(scenario, rollouts, trainer, warm, count)
        spent = now() - start
        await rollouts.close()
        made = count - warm
        return Measured(spent / made, made * workload.step_seconds / spent)

    return run(whole(), seconds=1e7)


def measure_sequential(workload: Workload, count: int = 20) -> Measured:
    """Sequential mode, really."""
    scenario = scenario_of(replace(workload, publish_every=1), 0, count)

    async def whole() -> Measured:
        trainer = scenario.trainer()
        trainer.commit_seconds = max(speed.pause_seconds for speed in workload.engines)
        rollouts = SequentialRollouts(trainer, scenario.how())
        await rollouts.join(*scenario.engines)
        start = now()
        for number in range(count):
            trainer.published = PolicyVersion(number)
            prompts = batch_of(Prompts(), scenario.bound, trainer.published)
            await rollouts.generate(prompts, min_version=trainer.published, seconds=1e6)
            await asyncio.sleep(workload.step_seconds)
        spent = now() - start
        await rollouts.close()
        return Measured(spent / count, count * workload.step_seconds / spent)

    return run(whole(), seconds=1e7)


WORKLOADS = [
    pytest.param(Workload(5.0, 8, (EngineSpeed(8, 4.0),)), id="trainer bound"),
    pytest.param(Workload(2.0, 8, (EngineSpeed(4, 8.0),) * 2), id="engine bound"),
    pytest.param(Workload(4.0, 8, (EngineSpeed(16, 20.0),) * 4), id="long rollouts"),
    pytest.param(
        Workload(4.0, 8, (EngineSpeed(4, 3.0, transfer_seconds=9.0),) * 2), id="slow link"
    ),
    pytest.param(
        Workload(4.0, 8, (EngineSpeed(8, 6.0, 1.0, pause_seconds=1.0),) * 2), id="long pause"
    ),
    pytest.param(
        Workload(4.0, 8, (EngineSpeed(8, 4.0), EngineSpeed(4, 12.0))), id="unequal engines"
    ),
    pytest.param(
        Workload(3.0, 6, (EngineSpeed(8, 5.0, 1.0),), publish_every=3), id="every third step"
    ),
]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_predictions_hold_for_the_real_parts(workload: Workload) -> None:
    answer = size(workload)
    real = measure(workload, answer.max_staleness)
    assert real.step_seconds == pytest.approx(answer.asynchronous.step_seconds, rel=0.12)
    assert real.trainer_busy == pytest.approx(answer.asynchronous.trainer_busy, abs=0.12)
    sequential = measure_sequential(workload)
    assert sequential.step_seconds == pytest.approx(answer.sequential.step_seconds, rel=0.2)
    # More staleness buys nothing in reality either, and one less costs something.
    more = measure(workload, answer.max_staleness + 4)
    assert more.step_seconds >= real.step_seconds * 0.88
    if answer.max_staleness > workload.publish_every - 1:
        less = simulate(workload, answer.max_staleness - 1)
        assert less.step_seconds > 1.02 * answer.asynchronous.step_seconds / 1.02


def test_the_least_staleness_is_least_in_reality_too() -> None:
    """Rollouts that take ten steps: with a much smaller bound both sides idle."""
    workload = Workload(4.0, 8, (EngineSpeed(24, 40.0),) * 4)
    answer = size(workload)
    assert answer.max_staleness >= 6
    enough = measure(workload, answer.max_staleness)
    half = measure(workload, answer.max_staleness // 2)
    assert half.step_seconds > 1.3 * enough.step_seconds


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.5, 20.0),
    st.integers(1, 24),
    st.integers(1, 4),
    st.integers(1, 12),
    st.floats(0.5, 30.0),
    st.floats(0.0, 5.0),
    st.integers(1, 3),
)
def test_answers_obey_the_bounds_that_hold_for_every_pipeline(
    step: float,
    batch: int,
    engines: int,
    slots: int,
    group: float,
    transfer: float,
    publish_every: int,
) -> None:
    speed = EngineSpeed(slots, group, transfer)
    workload = Workload(step, batch, (speed,) * engines, publish_every)
    answer = size(workload)
    least = max(step, workload.generation_seconds)
    for usage in (answer.asynchronous, answer.sequential):
        assert usage.step_seconds >= 0.93 * least
        assert 0 < usage.trainer_busy <= 1
        assert 0 < usage.engines_busy <= 1
    assert answer.max_staleness >= publish_every - 1
    # What is in flight must fit under the bound, give or take a batch; a version that has just
    # missed a transfer waits for the next one, so transfers count twice.
    in_flight = (step + 2 * transfer + 1.3 * group) / least + engines * slots / batch
    assert answer.max_staleness <= in_flight + publish_every + 1
    assert answer.speed_up >= 0.9


def test_with_the_advised_engines_the_trainer_never_waits() -> None:
    speed = EngineSpeed(4, 10.0, 1.0, 0.5)
    few = size(Workload(5.0, 8, (speed,)))
    assert few.engines_wanted is not None
    assert few.bottleneck == "engines"
    many = size(Workload(5.0, 8, (speed,) * few.engines_wanted))
    assert many.bottleneck == "trainer"
    assert many.asynchronous.trainer_busy > 0.95


def test_where_nothing_is_gained_sequential_mode_is_advised() -> None:
    assert size(Workload(100.0, 4, (EngineSpeed(8, 2.0),))).mode == "sequential"
    assert size(Workload(10.0, 8, (EngineSpeed(8, 10.0),))).mode == "asynchronous"


def test_pauses_longer_than_a_step_have_no_remedy_in_engines() -> None:
    slow = EngineSpeed(4, 1.0, pause_seconds=6.0)
    assert size(Workload(5.0, 4, (slow,))).engines_wanted is None
    assert size(Workload(5.0, 4, (slow,), publish_every=2)).engines_wanted == 1


def test_a_prediction_can_be_wrong() -> None:
    """The comparison above notices a model that forgets the transfer."""
    workload = Workload(4.0, 8, (EngineSpeed(4, 3.0, transfer_seconds=9.0),) * 2)
    forgetful = replace(workload, engines=(EngineSpeed(4, 3.0),) * 2)
    real = measure(workload, 0)
    assert real.step_seconds != pytest.approx(simulate(forgetful, 0).step_seconds, rel=0.2)
    assert real.step_seconds == pytest.approx(simulate(workload, 0).step_seconds, rel=0.2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"engines": ()}, "no engine"),
        ({"batch": 0}, "batch 0, publish_every 1: all must be positive"),
        ({"spread": 1.0}, "spread 1: a share of at least 0 and less than 1"),
        ({"engines": (EngineSpeed(0, 1.0),)}, "engine 0: slots and group_seconds must be"),
        ({"engines": (EngineSpeed(1, 1.0, -1.0),)}, "transfer and pause take 0 seconds or more"),
    ],
)
def test_what_cannot_be_sized_is_refused(change: dict[str, object], text: str) -> None:
    good = Workload(1.0, 1, (EngineSpeed(1, 1.0),))
    with pytest.raises(ReshardError, match=text):
        replace(good, **change)  # type: ignore[arg-type]


ARGUMENTS = ["--step-seconds", "5", "--rollout-seconds", "20", "--batch", "64", "--engines", "2"]


def test_the_command_answers_for_people_and_for_programs() -> None:
    shown = CliRunner().invoke(command, ARGUMENTS)
    assert shown.exit_code == 0
    assert "mode            asynchronous" in shown.output
    assert "engines keep the trainer busy; you have 2" in shown.output
    told = CliRunner().invoke(command, [*ARGUMENTS, "--json"])
    answer = json.loads(told.output)
    assert answer["mode"] == "asynchronous"
    assert answer["max_staleness"] >= 0
    assert set(answer["asynchronous"]) == {"step_seconds", "trainer_busy", "engines_busy"}


def test_bad_input_is_one_message_and_status_2() -> None:
    refused = CliRunner().invoke(command, [*ARGUMENTS[:-1], "0"])
    assert refused.exit_code == 2
    assert refused.output == "this workload cannot be sized\n  - no engine\n"
