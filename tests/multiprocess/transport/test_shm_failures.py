"""Shared memory when a side dies, stops or is slow: named in time, nothing left, nothing torn."""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from tests.multiprocess.transport import scenes
from tests.multiprocess.transport.ranks import Raised, Ranks, run_ranks

from reshard.board import BoardClient, BoardServer, Deadline
from reshard.session import Share
from reshard.transport.exhibits import Manifest
from reshard.transport.memory import OwnedSegment, Segment
from reshard.transport.shm import Announcement
from reshard.wire import decode

pytestmark = pytest.mark.multiprocess

SHARES: list[Share] = ["snapshot", "live"]
NAMES = {1: "rank 1 (trainer rank 1)", 2: "rank 2 (engine rank 0)"}


def left_behind(segments: Iterable[Segment]) -> list[str]:
    """Files in /dev/shm and mappings of any process that still hold this memory."""
    inodes = {str(segment.inode) for segment in segments}
    # Inodes are numbered apart in /dev/shm: torch's files there, of other tests, may have the same.
    left = [
        f"{file}"
        for file in Path("/dev/shm").iterdir()
        if not file.name.startswith("torch_") and str(file.stat().st_ino) in inodes
    ]
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[4] in inodes and words[5:] and words[5].startswith("/memfd:"):
                left.append(f"{maps}: {line}")
    return left


def shown_memory(board: BoardClient, ranks: Iterable[int]) -> list[Segment]:
    """What senders announced in their first attempt."""
    segments: list[Segment] = []
    for rank in ranks:
        raw = board.get(f"engine/e1/a1/shm/{rank}", Deadline.after(10))
        serial = decode(raw, Announcement).serial
        raw = board.get(f"engine/e1/shm/{rank}/{serial}", Deadline.after(10))
        manifest = decode(raw, Manifest)
        segments += [manifest.header, *manifest.segments]
    return segments


def test_the_oracle_of_what_is_left_can_fail() -> None:
    owned = OwnedSegment("reshard-test", 4096)
    assert any("/memfd:reshard-test" in line for line in left_behind([owned.segment]))
    owned.close()
    file = Path(f"/dev/shm/reshard_left_behind_{os.getpid()}")
    file.touch()
    try:
        named = msgspec.structs.replace(owned.segment, inode=file.stat().st_ino)
        assert left_behind([named]) == [str(file)]
    finally:
        file.unlink()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_peer_that_is_gone_is_named_and_leaves_nothing(
    share: Share, victim: int, how: str
) -> None:
    with BoardServer() as server, BoardClient(server.invitation, Deadline.after(10)) as board:
        # A killed rank is named at once; the deadline leaves room for a busy machine.
        seconds = 8.0 if how == "kill" else 4.0
        arguments = [(server.invitation, r, seconds, share) for r in range(4)]
        with Ranks(scenes.shm_until_it_fails, arguments) as ranks:
            for rank in range(4):
                board.get(f"engine/e1/busy/{rank}", Deadline.after(40))
            shown = shown_memory(board, [0, 1])
            assert left_behind(shown)
            (ranks.kill if how == "kill" else ranks.stop)(victim)
            outcomes = ranks.results(30, [r for r in range(4) if r != victim])
    for outcome in outcomes:
        assert not isinstance(outcome, Raised), outcome
        kind, text, took = outcome
        assert kind == "PeerError"
        assert NAMES[victim] in text
        assert took < 15
    assert not left_behind(shown)


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
