"""Engines that skip versions while they take an earlier one: nobody waits, nothing is mixed.

A gate at one engine's control routes makes it as slow as the test wants; nothing is timed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.multiprocess.trainer.peer import PeerEngine
from tests.multiprocess.trainer.test_overlap import BEGIN, shut, wait
from tests.multiprocess.trainer.test_publish import MODEL, check_serves, check_untouched
from tests.multiprocess.trainer.trainers import State, Trainers, close, expected, step

from reshard_trainer.reports import RefitReport

pytestmark = pytest.mark.multiprocess

SECONDS = 20.0
SKIP = {"overlap": True, "busy_engines": "skip"}
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "gloo"])


@contextmanager
def run(
    tmp_path: Path, transport: str, size: int = 2, **settings: object
) -> Iterator[tuple[PeerEngine, PeerEngine, Trainers]]:
    """A fast engine of two ranks, one of one rank that the test holds up, and the trainer."""
    with (
        PeerEngine(MODEL) as fast,
        PeerEngine(MODEL, 1) as slow,
        Trainers(size, "fsdp2" if size > 1 else "plain", tmp_path) as trainers,
    ):
        trainers.attach(fast.url, slow.url, **SKIP, transport=transport, **settings)
        yield fast, slow, trainers


def served(state: State, name: str, version: int) -> RefitReport | None:
    """Look until an engine has a version, without waiting for any other engine."""
    hook = state.hook
    assert hook is not None
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        report = hook.last_report
        part = report.engines.get(name) if report else None
        if part is not None and part.version == version:
            return report
        time.sleep(0.01)
    raise AssertionError(f"{name} did not get version {version}: {hook.last_report}")


def labels(state: State) -> dict[str, int | None]:
    """What each engine serves by the last report."""
    assert state.hook is not None
    report = state.hook.last_report
    return {name: part.version for name, part in report.engines.items()} if report else {}


@TRANSPORTS
def test_a_slow_engine_holds_up_nobody_and_skips_to_the_newest(
    transport: str, tmp_path: Path
) -> None:
    with run(tmp_path, transport) as (fast, slow, trainers):
        with shut(slow, BEGIN) as gate:
            for version in (1, 2, 3, 4):
                trainers.do(step)  # ends while the slow engine still takes version 1
                trainers.do(served, fast.name, version)
                check_serves(fast, version)
                check_untouched(slow)
            gate.set()
            trainers.do(served, slow.name, 1)
        # Version 1, whole, though the weights have moved on three times.
        check_serves(slow, 1)
        trainers.do(step)
        trainers.do(served, slow.name, 5)
        check_serves(slow, 5)
        trainers.do(wait)
        check_serves(fast, 5)
        assert slow.calls.count(BEGIN) == 2
        trainers.do(close)


@TRANSPORTS
def test_waiting_brings_skipped_engines_to_the_present(transport: str, tmp_path: Path) -> None:
    with run(tmp_path, transport) as (fast, slow, trainers):
        with shut(slow, BEGIN) as gate:
            for version in (1, 2):
                trainers.do(step)
                trainers.do(served, fast.name, version)
            trainers.start(wait)
            gate.set()
            trainers.end_well()
        check_serves(slow, 2)
        check_serves(fast, 2)
        assert fast.calls.count(BEGIN) == 2  # it had the present version already
        assert {tuple(sorted(each.value.items())) for each in trainers.do(labels)} == {  # type: ignore[attr-defined]
            tuple(sorted({fast.name: 2, slow.name: 2}.items()))
        }


def test_closing_leaves_no_engine_behind(tmp_path: Path) -> None:
    with run(tmp_path, "shm", size=1) as (fast, slow, trainers):
        with shut(slow, BEGIN) as gate:
            for version in (1, 2, 3):
                trainers.do(step)
                trainers.do(served, fast.name, version)
            gate.set()
            trainers.do(close)
        check_serves(slow, 3)
        check_serves(fast, 3)


def test_a_slow_engine_that_fails_is_raised_by_a_later_publish_on_all_ranks(tmp_path: Path) -> None:
    with run(tmp_path, "auto") as (fast, slow, trainers):
        with shut(slow, BEGIN) as gate:
            for version in (1, 2):
                trainers.do(step)
                trainers.do(served, fast.name, version)
            slow.answers[BEGIN] = (500, {"error": {"message": "no memory left"}})
            gate.set()
            error = trainers.fail(wait)
        assert "no memory left" in error.text
        assert slow.name in error.text
        check_untouched(slow)
        slow.answers.clear()
        trainers.do(step)
        trainers.do(wait)
        check_serves(slow, 3)
        check_serves(fast, 3)


def test_live_weights_are_held_for_a_slow_engine(tmp_path: Path) -> None:
    """No copy, so the step has to wait: what the slow engine gets is not of the next version."""
    with run(tmp_path, "shm", share="live") as (_, slow, trainers):
        with shut(slow, BEGIN) as gate:
            trainers.do(step)
            trainers.start(step)
            gate.wait(0.3)  # long enough for a step that does not wait
            check_untouched(slow)
            gate.set()
            trainers.end_well()
        trainers.do(wait)
        check_serves(slow, 2)


def test_a_copy_is_sent_whatever_becomes_of_the_weights(tmp_path: Path) -> None:
    with run(tmp_path, "gloo", size=1, verify="always") as (fast, slow, trainers):
        with shut(slow, BEGIN) as gate:
            trainers.do(step)
            trainers.do(served, fast.name, 1)
            trainers.do(_fill)
            gate.set()
            (said,) = trainers.do(served, slow.name, 1)
        weights = slow.weights()
        for name, whole in expected(1).items():
            assert torch.equal(weights[name], whole), name
        assert said.report is not None
        part = said.report.engines[slow.name]
        assert part.extra_bytes[0] >= sum(part.received_bytes)  # the copy is counted


def _fill(state: State) -> None:
    """Change the weights behind the optimizer's back."""
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(-7.0)


def test_steps_that_wait_cannot_skip(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(1, "plain", tmp_path) as trainers:
        error = trainers.fail_to_attach(peer.url, busy_engines="skip")
    assert "busy_engines='skip' with overlap=False" in error.text
