"""The four ways: where rollouts come from is all that differs between them."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from examples.parity.experiment import Experiment, Notice, Run
from examples.parity.learner import Learned, Learner
from examples.parity.own_model import OwnModel

import reshard_trainer
from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.asynchronous import AsynchronousRollouts
from reshard_trainer.rollouts.background import (
    BackgroundAsynchronous,
    BackgroundSequential,
    asynchronous_in_background,
    sequential_in_background,
)
from reshard_trainer.rollouts.desk import DeskSettings
from reshard_trainer.rollouts.generating import Generating
from reshard_trainer.rollouts.http_endpoint import HttpEndpoint
from reshard_trainer.rollouts.meter import Meter
from reshard_trainer.rollouts.prompts import ShuffledPrompts
from reshard_trainer.rollouts.refresh import HookRefresher
from reshard_trainer.rollouts.reward import immediate
from reshard_trainer.rollouts.sampling import Sampling
from reshard_trainer.rollouts.sequential import SequentialRollouts, batch_of
from reshard_trainer.rollouts.staleness import StalenessBound

WAIT_SECONDS = 120.0  # longest wait for a batch


def colocated(experiment: Experiment, seed: int, notice: Notice) -> Run:
    """The trainer generates with its own model, and waits for itself."""
    run = Run("co-located", seed)
    learner = Learner.start(experiment.start, seed)
    prompts, bound = stream(experiment, seed), StalenessBound(experiment.batch, 0)
    own = OwnModel(learner, experiment, seed)
    start = time.perf_counter()
    for version in map(PolicyVersion, range(experiment.steps)):
        before = time.perf_counter()
        groups = own.generate(batch_of(prompts, bound, version), version)
        run.waited_seconds += time.perf_counter() - before
        record(run, learner.step(groups), [0] * len(groups), start)
        notice(run)
    return run


def sequential(experiment: Experiment, seed: int, notice: Notice) -> Run:
    """Each step's rollouts are asked of the engines at the step's own version."""
    run = Run("sequential", seed)
    learner = Learner.start(experiment.start, seed)
    prompts, bound = stream(experiment, seed), StalenessBound(experiment.batch, 0)
    with (
        attached(learner, experiment, run) as hook,
        sequential_rollouts(hook, experiment, seed) as from_,
    ):
        start = time.perf_counter()
        for version in map(PolicyVersion, range(experiment.steps)):
            groups = from_.generate(
                batch_of(prompts, bound, version), min_version=version, seconds=WAIT_SECONDS
            )
            learned = learner.step(groups)
            record(run, learned, [version - group.oldest for group in groups], start)
            measure(run, experiment, from_.meter)
            notice(run)
    return run


def asynchronous(max_staleness: int) -> Callable[[Experiment, int, Notice], Run]:
    """Engines generate all the time; the trainer takes what is ready."""

    def way(experiment: Experiment, seed: int, notice: Notice) -> Run:
        run = Run(f"asynchronous {max_staleness}", seed)
        learner = Learner.start(experiment.start, seed)
        bound = StalenessBound(experiment.batch, max_staleness)
        with (
            attached(learner, experiment, run, beside_training=True) as hook,
            asynchronous_rollouts(hook, experiment, seed, bound) as from_,
        ):
            start = time.perf_counter()
            while hook.version < experiment.steps:
                batch = from_.take(hook.version, seconds=WAIT_SECONDS)
                from_.publish(PolicyVersion(hook.version + 1))  # engines have it before step ends
                learned = learner.step(batch.groups)
                record(run, learned, batch.staleness, start)
                measure(run, experiment, from_.meter)
                notice(run)
        return run

    return way


WAYS: dict[str, Callable[[Experiment, int, Notice], Run]] = {
    "co-located": colocated,
    "sequential": sequential,
    "asynchronous 1": asynchronous(1),
    "asynchronous 4": asynchronous(4),
}


def stream(experiment: Experiment, seed: int) -> ShuffledPrompts:
    """The run's prompts: of one seed the same in all ways."""
    return ShuffledPrompts(experiment.task.prompts, seed=seed)


def generating(experiment: Experiment, seed: int) -> Generating:
    """How engines make groups."""
    return Generating(
        Sampling(max_tokens=experiment.task.length, ignore_eos=True, seed=seed),
        immediate(experiment.task.reward),
        samples=experiment.samples,
    )


def attached(
    learner: Learner, experiment: Experiment, run: Run, *, beside_training: bool = False
) -> reshard_trainer.Hook:
    """The one line; and the first weights, so that all runs begin with their own."""
    hook = reshard_trainer.attach(
        learner.model,
        learner.optimizer,
        [engine.url for engine in experiment.engines],
        overlap=beside_training,
        busy_engines="skip" if beside_training else "wait",
        on_report=run.note_publish,
    )
    hook.publish()
    run.publish_seconds = 0.0
    return hook


def sequential_rollouts(
    hook: reshard_trainer.Hook, experiment: Experiment, seed: int
) -> AbstractContextManager[BackgroundSequential]:
    """The engines, asked step by step."""
    return sequential_in_background(
        lambda: SequentialRollouts(HookRefresher(hook), generating(experiment, seed)),
        lambda: endpoints(experiment),
    )


def asynchronous_rollouts(
    hook: reshard_trainer.Hook, experiment: Experiment, seed: int, bound: StalenessBound
) -> AbstractContextManager[BackgroundAsynchronous]:
    """The engines, at work all the time."""
    return asynchronous_in_background(
        lambda: AsynchronousRollouts(
            stream(experiment, seed),
            HookRefresher(hook),
            generating(experiment, seed),
            DeskSettings(bound),
        ),
        lambda: endpoints(experiment),
    )


def endpoints(experiment: Experiment) -> list[HttpEndpoint]:
    """How rollouts reach the engines."""
    return [HttpEndpoint(engine.url, slots=engine.slots) for engine in experiment.engines]


def record(run: Run, learned: Learned, staleness: Sequence[int], start: float) -> None:
    """Note one step."""
    run.rewards.append(learned.reward)
    run.gaps.append(learned.gap)
    run.seconds.append(time.perf_counter() - start)
    run.staleness.update(staleness)


def measure(run: Run, experiment: Experiment, meter: Meter) -> None:
    """Read the run's counters."""
    value = meter.registry.get_sample_value

    def idle(side: str, name: str) -> float:
        return value("reshard_idle_seconds_total", {"side": side, "name": name}) or 0.0

    run.waited_seconds = idle("trainer", "trainer")
    for engine in experiment.engines:
        share = idle("engine", engine.name) / run.wall_seconds
        run.idle[engine.name] = min(1.0, share)
    outcomes = ("evicted_running", "evicted_waiting")
    run.evicted = sum(
        int(value("reshard_groups_total", {"outcome": outcome}) or 0) for outcome in outcomes
    )
    waiting, running = value("reshard_buffered_groups"), value("reshard_running_groups")
    run.state = f"{waiting:.0f} groups wait, {running:.0f} run" if waiting is not None else ""
