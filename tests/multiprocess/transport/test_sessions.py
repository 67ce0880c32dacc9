"""Groups and sessions of real processes: default groups, several at once, addresses, rebuilding."""

from pathlib import Path

import pytest
from tests.multiprocess.transport import scenes
from tests.multiprocess.transport.ranks import Raised, Ranks, run_ranks

from reshard.board import BoardServer

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("bound", [False, True])
def test_default_groups_stay_as_they_are(tmp_path: Path, bound: bool) -> None:
    with BoardServer() as server:
        arguments = [(server.invitation, r, str(tmp_path / "store"), bound) for r in range(4)]
        results = run_ranks(scenes.beside_a_default_group, arguments)
    assert results == [([], 1.0, 2), ([], 1.0, 2), ([], 5.0, 2), ([], 5.0, 2)]


def test_two_sessions_from_two_threads_of_each_process() -> None:
    with BoardServer() as server:
        results = run_ranks(scenes.two_sessions_at_once, [(server.invitation, r) for r in range(4)])
    assert results == [[]] * 4


def test_two_runs_on_one_host() -> None:
    """Two trainer-engine pairs with default settings, at the same time."""
    with BoardServer() as one, BoardServer() as two:
        invitations = [one.invitation] * 4 + [two.invitation] * 4
        arguments = [(inv, r % 4, 4, None, 30.0) for r, inv in enumerate(invitations)]
        assert run_ranks(scenes.meet, arguments) == [[]] * 8


@pytest.mark.parametrize(
    ("board_host", "host"),
    [("::1", None), ("127.0.0.1", "[::1]"), ("[::1]", "lo"), ("localhost", "localhost")],
)
def test_addresses(board_host: str, host: str | None) -> None:
    with BoardServer(board_host) as server:
        arguments = [(server.invitation, r, 4, host, 30.0) for r in range(4)]
        assert run_ranks(scenes.meet, arguments) == [[]] * 4


def test_an_address_of_another_machine() -> None:
    with BoardServer() as server:
        arguments = [(server.invitation, r, 4, "192.0.2.1", 30.0) for r in range(4)]
        for result in run_ranks(scenes.meet, arguments):
            assert "gloo cannot listen on '192.0.2.1'" in result
            assert "name an address of this machine or an interface: lo" in result


def test_ranks_that_do_not_come_are_named() -> None:
    with BoardServer() as server:
        arguments = [(server.invitation, r, 4, None, 1.0) for r in (0, 1)]
        for result in run_ranks(scenes.meet, arguments):
            assert result == (
                "DeadlineExceeded: no answer from rank 2 (engine rank 0), rank 3 (engine rank 1) "
                "in phase open within 1 s"
            )


def test_ranks_that_count_differently_are_refused() -> None:
    with BoardServer() as server:
        arguments = [(server.invitation, r, 5 if r == 2 else 4, None, 2.0) for r in range(4)]
        for rank, result in enumerate(run_ranks(scenes.meet, arguments)):
            if rank != 2:
                assert "rank 2 (engine rank 0) counts 5 ranks; 4 are expected" in result


def test_messages_of_different_sizes_are_refused_before_the_first_byte() -> None:
    """gloo would end the process."""
    with BoardServer() as server:
        results = run_ranks(scenes.buckets_differ, [(server.invitation, r) for r in range(2)])
    kinds = [kind for kind, _ in results]
    assert set(kinds) <= {"DigestMismatch", "PeerError"}
    assert "DigestMismatch" in kinds
    for _, text in results:
        assert "ranks would send and receive different messages; nothing was sent" in text
        assert "rank 1 (engine rank 0): attempt 1" in text or "rank 0 (trainer rank 0)" in text


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_the_exactness_oracle_can_fail(kind: str) -> None:
    with BoardServer() as server:
        results = run_ranks(scenes.sabotaged, [(server.invitation, r, kind) for r in range(4)])
    assert results[:2] == [[], []]
    assert all(results[2:])


def test_a_tensor_of_a_thousand_buckets_takes_bounded_memory() -> None:
    with BoardServer() as server:
        results = run_ranks(scenes.memory_of_a_refit, [(server.invitation, r) for r in range(4)])
    for extra_bytes, messages, wrong in results:
        assert not wrong
        assert messages >= 512
        assert extra_bytes <= 3 * 1024


def test_survivors_go_on_in_the_next_session() -> None:
    with BoardServer() as server:
        arguments = [(server.invitation, r, 3, [4, 5]) for r in range(4)]
        with Ranks(scenes.rebuilt_without, arguments) as ranks:
            results = ranks.results(60, [0, 1, 2])
    for result in results:
        assert not isinstance(result, Raised), result
        text, wrong = result
        assert "rank 3 (engine rank 1)" in text
        assert not wrong


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_nothing_grows_over_many_refits(kind: str) -> None:
    with BoardServer() as server:
        arguments = [(server.invitation, r, kind, 100) for r in range(4)]
        for held in run_ranks(scenes.soak, arguments):
            for what, (early, late) in held.items():
                assert early == late, f"{what}: {early} after 20 refits, {late} after 100"
        board = server._board
        assert board.open_waits <= 4
        assert len(board._expiries) <= 100
