"""Rollouts from other processes, over the authenticated socket; some of them are killed."""

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from tests.multiprocess.rollouts.worker import Order
from tests.support.processes import Started, started, wait_until
from tests.unit.rollouts.runs import half
from tests.unit.rollouts.simulated import Prompts, SimulatedTrainer

from reshard.board import Invitation
from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.asynchronous import AsynchronousRollouts
from reshard_trainer.rollouts.background import (
    BackgroundAsynchronous,
    asynchronous_in_background,
)
from reshard_trainer.rollouts.buffer import Batch
from reshard_trainer.rollouts.desk import DeskSettings
from reshard_trainer.rollouts.generating import Generating
from reshard_trainer.rollouts.reward import immediate
from reshard_trainer.rollouts.sampling import Sampling
from reshard_trainer.rollouts.staleness import StalenessBound

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[3]
BOUND = StalenessBound(batch=4, max_staleness=2)


def rollouts() -> AsynchronousRollouts:
    """A trainer's side without engines of its own."""
    how = Generating(Sampling(max_tokens=4), immediate(half), samples=2)
    return AsynchronousRollouts(Prompts(), SimulatedTrainer({}), how, DeskSettings(BOUND))


class Workers:
    """Worker processes of one test."""

    def __init__(self, invitation: Invitation, folder: Path) -> None:
        self._invitation = invitation
        self._folder = folder
        self._stack = ExitStack()

    def start(self, name: str, token_seconds: float = 0.01) -> Started:
        order = Order(self._invitation, name, token_seconds, slots=6, samples=2, tokens=4)
        file = self._folder / f"{name}.json"
        file.touch(mode=0o600)
        file.write_bytes(msgspec.json.encode(order))
        command = [sys.executable, "-m", "tests.multiprocess.rollouts.worker", str(file)]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return self._stack.enter_context(
            started(command, log=self._folder / f"{name}.log", env={"PYTHONPATH": paths})
        )

    def close(self) -> None:
        self._stack.close()


def train(background: BackgroundAsynchronous, first: int, last: int) -> list[Batch]:
    batches = []
    for version in range(first, last):
        batches.append(background.take(PolicyVersion(version), 60.0))
        time.sleep(0.02)
        background.publish(PolicyVersion(version + 1))
    return batches


def check(batches: list[Batch]) -> None:
    for batch in batches:
        assert all(0 <= lag <= BOUND.max_staleness for lag in batch.staleness)
    serials = [each.serial for batch in batches for each in batch.groups]
    assert len(serials) == len(set(serials))


def who(batches: list[Batch]) -> set[str]:
    return {
        name
        for batch in batches
        for each in batch.groups
        for rollout in each.rollouts
        for name in rollout.engines
    }


def test_workers_come_and_go_and_nothing_is_lost_or_counted_twice(tmp_path: Path) -> None:
    with asynchronous_in_background(rollouts, list) as background:
        workers = Workers(background.serve(lease_seconds=1.0), tmp_path)
        try:
            first = workers.start("first")
            second = workers.start("second", token_seconds=0.03)
            batches = train(background, 0, 15)
            assert who(batches) <= {"first", "second"}
            os.kill(first.process.pid, signal.SIGKILL)
            batches += train(background, 15, 25)
            workers.start("third")
            deadline = time.monotonic() + 90
            while "third" not in who(batches[-1:]):
                assert time.monotonic() < deadline, "the third worker did not take part"
                batches += train(background, len(batches), len(batches) + 1)
            check(batches)
            saved = background.save(PolicyVersion(len(batches)))
            unfinished = {serial for serial, _, _ in saved.records}
            trained = {each.serial for batch in batches for each in batch.groups}
            assert trained | unfinished == set(range(saved.next_serial))
            assert second.process.poll() is None
        finally:
            workers.close()


def test_workers_end_when_the_trainer_closes(tmp_path: Path) -> None:
    workers: Workers | None = None
    try:
        with asynchronous_in_background(rollouts, list) as background:
            workers = Workers(background.serve(), tmp_path)
            only = workers.start("only")
            check(train(background, 0, 2))
        assert wait_until(lambda: only.process.poll() is not None, 30)
        assert only.process.returncode == 0, only.log_tail()
    finally:
        if workers is not None:
            workers.close()
