"""Publishes beside the training: what the engine gets is what was published, whatever comes next.

A gate at the engine's control routes holds a publish where the test wants it; nothing is timed.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.multiprocess.trainer.peer import PeerEngine
from tests.multiprocess.trainer.test_publish import MODEL, check_serves, check_untouched
from tests.multiprocess.trainer.trainers import State, Trainers, close, expected, step

from reshard_trainer.session import Session

pytestmark = pytest.mark.multiprocess

BEGIN = "/start_weight_update"


@contextmanager
def shut(peer: PeerEngine, path: str) -> Iterator[threading.Event]:
    """A gate, shut; opened at the end at the latest."""
    gate = peer.gates[path] = threading.Event()
    try:
        yield gate
    finally:
        gate.set()


def wait(state: State, deadline: float | None = None) -> None:
    assert state.hook is not None
    state.hook.wait(deadline)


def scribble(state: State) -> None:
    """Change the weights behind the optimizer's back."""
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(-7.0)


def step_notes_release(state: State) -> list[str]:
    """A step; in which order it and the reading of the weights before it came to their end."""
    notes: list[str] = []
    hook = state.hook
    assert hook is not None
    (publication,) = hook._under_way
    handle = state.optimizer.register_step_pre_hook(
        lambda *_: notes.append("read" if publication._released.is_set() else "unread")
    )
    step(state)
    handle.remove()
    return notes


@pytest.mark.parametrize(("kind", "size"), [("plain", 1), ("fsdp2", 2)])
def test_a_snapshot_frees_the_weights_at_once(kind: str, size: int, tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(size, kind, tmp_path) as trainers:  # type: ignore[arg-type]
        trainers.attach(peer.url, transport="shm", overlap=True, verify="never")
        with shut(peer, BEGIN) as gate:
            trainers.do(step)
            check_untouched(peer)
            trainers.do(scribble)
            gate.set()
            said = trainers.do(wait)
        check_serves(peer, 1)
        assert [each.state for each in said] == ["published"] * size
        report = said[0].report
        assert report is not None
        assert 0 < report.stall_seconds < report.total_seconds


@pytest.mark.parametrize(("transport", "share"), [("shm", "live"), ("gloo", "snapshot")])
def test_a_step_waits_for_weights_that_are_read(transport: str, share: str, tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        # Of versions 1, 2, 3 only 2 is published: what the engine gets must not be of 3.
        settings = {"transport": transport, "share": share, "overlap": True, "publish_every": 2}
        trainers.attach(peer.url, version=1, **settings)
        with shut(peer, BEGIN) as gate:
            trainers.do(step)
            check_untouched(peer)
            trainers.start(step_notes_release)
            # Long enough for a step that does not wait.
            gate.wait(0.3)
            gate.set()
            said = trainers.end_well()
        assert [each.value for each in said] == [["read"]] * 2
        trainers.do(wait)
        assert peer.weight_version == "2"
        weights = peer.weights()
        for name, whole in expected(1).items():
            assert torch.equal(weights[name], whole), name


def test_a_verified_refit_holds_the_weights_until_it_is_verified(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        settings = {"transport": "shm", "overlap": True, "publish_every": 2, "verify": "always"}
        trainers.attach(peer.url, version=1, **settings)
        with shut(peer, BEGIN) as gate:
            trainers.do(step)
            trainers.start(step_notes_release)
            # Long enough for a step that does not wait.
            gate.wait(0.3)
            gate.set()
            said = trainers.end_well()
        assert [each.value for each in said] == [["read"]] * 2
        trainers.do(wait)
        assert peer.weight_version == "2"


def test_the_next_publish_waits_for_the_one_under_way(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url, transport="shm", overlap=True)
        for steps in (1, 2, 3):
            said = trainers.do(step)
            report = said[0].report
            assert (report.version if report else 0) == steps - 1
        trainers.do(wait)
        check_serves(peer, 3)
        trainers.do(close)


def test_what_fails_is_raised_by_the_next_publish(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url, overlap=True)
        peer.answers[BEGIN] = (500, {"error": {"message": "no memory left"}})
        trainers.do(step)
        assert "no memory left" in trainers.fail(step).text
        check_untouched(peer)
        peer.answers.clear()
        trainers.do(step)
        trainers.do(wait)
        check_serves(peer, 3)


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url, transport="shm", overlap=True)
        with shut(peer, BEGIN) as gate:
            trainers.do(step)
            late = trainers.fail(wait, 0.2).text
            assert f"version 1 to {peer.name} is still under way after 0.2 s" in late
            gate.set()
            trainers.do(wait)
        check_serves(peer, 1)


def test_closing_waits_for_the_publish_under_way(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url, transport="shm", overlap=True)
        trainers.do(step)
        trainers.do(close)
        check_serves(peer, 1)


def _watch_stages(state: State) -> None:
    """Note how many refits at a time read the weights to show or keep them."""
    inside: list[Session] = []
    stage = Session.stage

    def watched(session: Session, *arguments: object) -> bool:
        inside.append(session)
        state.notes.append((len(inside), session.info.engine))
        time.sleep(0.05)  # long enough for another to come in
        try:
            return stage(session, *arguments)  # type: ignore[arg-type]
        finally:
            inside.remove(session)

    Session.stage = watched  # type: ignore[assignment,method-assign]


def _most_at_once(state: State) -> int:
    return max(number for number, _ in state.notes)


@pytest.mark.parametrize("busy_engines", ["wait", "skip"])
def test_weights_that_move_into_shared_memory_are_read_by_nobody(
    busy_engines: str, tmp_path: Path
) -> None:
    """Two engines at their first refit: a storage moves once, and not under a reader."""
    with (
        PeerEngine(MODEL) as one,
        PeerEngine(MODEL, 1) as other,
        Trainers(2, "fsdp2", tmp_path) as trainers,
    ):
        settings = {"overlap": True, "share": "live", "busy_engines": busy_engines}
        trainers.attach(one.url, other.url, **settings)
        trainers.do(_watch_stages)
        for _ in range(2):
            trainers.do(step)
        trainers.do(wait)
        check_serves(one, 2)
        check_serves(other, 2)
        assert {each.value for each in trainers.do(_most_at_once)} == {1}
