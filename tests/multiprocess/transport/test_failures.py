"""Peers that die, stop, raise or never come: an error by the deadline that names them."""

import time

import pytest
from tests.multiprocess.transport.ranks import Raised, Ranks
from tests.multiprocess.transport.workers import refit_until_it_fails

from reshard.agreement import read_fault
from reshard.board import BoardClient, BoardServer, Deadline

pytestmark = pytest.mark.multiprocess

SESSION = "engine/e1"
CULPRIT = "rank 1 (trainer rank 1)"


def fail_with(trouble: str, seconds: float) -> tuple[dict[int, tuple[str, str, float]], object]:
    """Outcome by surviving rank, and the fault on the board."""
    with BoardServer() as server, BoardClient(server.invitation, Deadline.after(10)) as board:
        arguments = [(server.invitation, SESSION, r, seconds, trouble) for r in range(4)]
        with Ranks(refit_until_it_fails, arguments) as ranks:
            for rank in range(4):
                board.get(f"{SESSION}/busy/{rank}", Deadline.after(40))
            time.sleep(0.1)
            if trouble == "killed":
                ranks.kill(1)
            if trouble == "stopped":
                ranks.stop(1)
            survivors = [0, 2, 3]
            outcomes = dict(zip(survivors, ranks.results(60, survivors), strict=True))
        fault = read_fault(board, SESSION, Deadline.after(0))
    for rank, outcome in outcomes.items():
        assert not isinstance(outcome, Raised), f"rank {rank}: {outcome}"
    return outcomes, fault


def test_a_killed_peer_is_named_at_once() -> None:
    outcomes, fault = fail_with("killed", 30)
    for kind, text, took in outcomes.values():
        assert kind == "PeerError"
        assert CULPRIT in text
        # In its messages, or between two refits.
        assert "phase transfer, tensor big" in text or "phase agree" in text
        assert took < 20
    assert fault is not None


def test_a_peer_that_dies_before_it_comes_is_named_at_once() -> None:
    outcomes, _ = fail_with("dies", 30)
    for kind, text, took in outcomes.values():
        assert kind == "PeerError"
        assert f"{CULPRIT} failed in phase agree: its process has ended" in text
        assert f"waiting for {CULPRIT} to come to the exchange" in text
        assert took < 20


def test_a_stopped_peer_is_named_by_the_deadline() -> None:
    outcomes, _ = fail_with("stopped", 4)
    for kind, text, took in outcomes.values():
        assert kind == "PeerError"
        assert CULPRIT in text
        assert took < 15


def test_an_exception_reaches_every_rank_with_its_text() -> None:
    with BoardServer() as server:
        arguments = [(server.invitation, SESSION, r, 30, "raises") for r in range(4)]
        with Ranks(refit_until_it_fails, arguments) as ranks:
            outcomes = ranks.results(60)
    for rank, (kind, text, took) in enumerate(outcomes):
        assert kind == ("ReshardError" if rank == 1 else "PeerError")
        assert "ValueError: out of luck" in text
        assert CULPRIT in text
        assert took < 20


def test_a_peer_that_never_comes_is_named() -> None:
    outcomes, _ = fail_with("late", 3)
    for kind, text, _ in outcomes.values():
        assert kind == "PeerError"
        assert f"{CULPRIT} failed in phase agree: did not take part within 3 s" in text
        assert f"waiting for {CULPRIT} to come to the exchange" in text
