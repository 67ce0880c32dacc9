"""Gathering and agreeing over a live board, ranks as threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from reshard.agreement import agree, gather, read_fault, report_fault, session_of
from reshard.board import BoardClient, BoardServer, Deadline
from reshard.errors import DeadlineExceeded, PeerError
from reshard.session import Fault

T = TypeVar("T")
RANKS = range(4)


@pytest.fixture(scope="module")
def board() -> Iterator[BoardClient]:
    with BoardServer() as server, BoardClient(server.invitation, Deadline.after(10)) as client:
        yield client


def on_every_rank(
    step: Callable[[int], T], ranks: "range | list[int]" = RANKS
) -> dict[int, T | str]:
    """What a step returned on each rank, or the text of its error."""

    def outcome(rank: int) -> T | str:
        try:
            return step(rank)
        except (PeerError, DeadlineExceeded) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(RANKS)) as pool:
        return dict(zip(ranks, pool.map(outcome, ranks), strict=True))


def test_every_rank_gets_every_value(board: BoardClient) -> None:
    answers = on_every_rank(lambda r: gather(board, "g1", r, RANKS, b"%d" % r, Deadline.after(20)))
    assert answers == {rank: {r: b"%d" % r for r in RANKS} for rank in RANKS}


def test_silent_ranks_are_named(board: BoardClient) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        gather(board, "s/e1/receive", 0, RANKS, b"", Deadline.after(0.1), trainer_size=2)
    assert str(caught.value) == (
        "no answer from rank 1 (trainer rank 1), rank 2 (engine rank 0), rank 3 (engine rank 1) in "
        "phase receive within 0.1 s"
    )


def test_a_fault_of_the_session_ends_the_wait_with_its_culprit(board: BoardClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            gather, board, "f/e3/a1/received", 0, RANKS, b"", Deadline.after(60), trainer_size=2
        )
        fault = Fault(3, "transfer", "out of memory", "lm_head")
        assert report_fault(board, "f/e3", fault, Deadline.after(5)) == fault
        with pytest.raises(PeerError) as caught:
            waiting.result(20)
    assert str(caught.value) == (
        "rank 3 (engine rank 1) failed in phase transfer, tensor lm_head: out of memory"
    )


def test_the_first_fault_stands(board: BoardClient) -> None:
    first, second = Fault(1, "pack", "first"), Fault(2, "pack", "second")
    assert report_fault(board, "w/e1", first, Deadline.after(5)) == first
    assert report_fault(board, "w/e1", second, Deadline.after(5)) == first
    assert read_fault(board, "w/e1", Deadline.after(5)) == first
    assert read_fault(board, "w/e2", Deadline.after(0)) is None


def test_another_sessions_fault_does_not_matter(board: BoardClient) -> None:
    report_fault(board, "o/e1", Fault(1, "pack", "old"), Deadline.after(5))
    answers = on_every_rank(lambda r: gather(board, "o/e2/x", r, RANKS, b"", Deadline.after(20)))
    assert all(isinstance(answer, dict) for answer in answers.values())


def test_agreement_returns_where_all_are_well(board: BoardClient) -> None:
    step = lambda r: agree(board, "a1", r, RANKS, None, Deadline.after(20))  # noqa: E731
    assert on_every_rank(step) == dict.fromkeys(RANKS)


def test_disagreement_is_the_same_error_everywhere(board: BoardClient) -> None:
    errors = {1: "disk full", 3: "no such name"}
    outcomes = on_every_rank(
        lambda r: agree(
            board, "x/e1/prepare", r, RANKS, errors.get(r), Deadline.after(20), trainer_size=2
        )
    )
    expected = (
        "PeerError: 2 of 4 ranks failed in prepare\n"
        "  - rank 1 (trainer rank 1): disk full\n"
        "  - rank 3 (engine rank 1): no such name"
    )
    assert outcomes == dict.fromkeys(RANKS, expected)


def test_an_empty_error_text_is_an_error(board: BoardClient) -> None:
    outcomes = on_every_rank(
        lambda r: agree(board, "empty", r, RANKS, "" if r == 1 else None, Deadline.after(20))
    )
    assert all("1 of 4 ranks failed" in str(outcome) for outcome in outcomes.values())


def test_silence_is_no_agreement(board: BoardClient) -> None:
    step = lambda r: agree(board, "silence", r, RANKS, None, Deadline.after(0.2))  # noqa: E731
    outcomes = on_every_rank(step, [0, 1, 3])
    assert all("no answer from rank 2 in phase silence" in str(o) for o in outcomes.values())


@pytest.mark.parametrize(
    ("scope", "session"),
    [
        ("e1/e2/x", "e1/e2"),
        ("http://h:1/e12/a3/received", "http://h:1/e12"),
        ("engine/e1", "engine/e1"),
        ("engine/east/x", None),
        ("trainer/step", None),
    ],
)
def test_sessions_of_scopes(scope: str, session: str | None) -> None:
    assert session_of(scope) == session
