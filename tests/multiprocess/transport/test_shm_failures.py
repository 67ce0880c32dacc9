"""Shared memory when a side dies, stops or is slow: named in time, nothing left, nothing torn."""

import time
from pathlib import Path

import pytest
from tests.multiprocess.transport import scenes
from tests.multiprocess.transport.ranks import Raised, Ranks, run_ranks

from reshard.board import BoardClient, BoardServer, Deadline
from reshard.transport.shm import Share

pytestmark = pytest.mark.multiprocess

SHARES: list[Share] = ["snapshot", "live"]
NAMES = {1: "rank 1 (trainer rank 1)", 2: "rank 2 (engine rank 0)"}


def shared_files() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith("torch_")}


def mapped_by_anyone() -> int:
    """Processes that hold this package's shared memory."""
    holders = 0
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            holders += "reshard-s" in maps.read_text()
        except OSError:
            continue
    return holders


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_peer_that_is_gone_is_named_and_leaves_nothing(
    share: Share, victim: int, how: str
) -> None:
    files, holders = shared_files(), mapped_by_anyone()
    with BoardServer() as server, BoardClient(server.invitation, Deadline.after(10)) as board:
        arguments = [(server.invitation, r, 2.0, share) for r in range(4)]
        with Ranks(scenes.shm_until_it_fails, arguments) as ranks:
            for rank in range(4):
                board.get(f"engine/e1/busy/{rank}", Deadline.after(40))
            time.sleep(0.05)
            (ranks.kill if how == "kill" else ranks.stop)(victim)
            outcomes = ranks.results(30, [r for r in range(4) if r != victim])
    for outcome in outcomes:
        assert not isinstance(outcome, Raised), outcome
        kind, text, took = outcome
        assert kind == "PeerError"
        assert NAMES[victim] in text
        assert took < 15
    assert shared_files() == files
    assert mapped_by_anyone() == holders


@pytest.mark.parametrize("share", SHARES)
def test_a_reader_that_was_too_slow_notices(share: Share) -> None:
    """The sender gives up on it and goes on training: the reader must not take what it read."""
    with BoardServer() as server:
        results = run_ranks(scenes.slow_reader, [(server.invitation, r, share) for r in range(2)])
    assert results[0][0] == "PeerError"
    assert "rank 1 (engine rank 0)" in results[0][1]
    assert "to read its weights" in results[0][1]
    assert results[1][0] == "PeerError"
    assert (
        "the weights of rank 0 (trainer rank 0) changed while this rank read them"
        in (results[1][1])
    )
