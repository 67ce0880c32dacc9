"""The board's state against a plain dict, with requests that come twice, late, or never end."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from reshard.board.blackboard import Blackboard, BoardLimits
from reshard.board.messages import (
    Add,
    DeletePrefix,
    Forget,
    Leave,
    Operation,
    Ping,
    Put,
    PutFirst,
    Reply,
    Request,
    Wait,
)

SMALL = BoardLimits(message_bytes=200, total_bytes=400, keys=5, key_length=10, waits=3, clients=4)
CLIENTS = [b"one", b"two"]
KEYS = ["a", "ab", "b"]


class Asker:
    """One client of a blackboard: numbers its requests as the real one does."""

    def __init__(self, board: Blackboard, name: bytes = b"client") -> None:
        self.board = board
        self.name = name
        self.number = 0
        self.settled = 0

    def ask(self, operation: Operation, now: float = 0.0) -> list[tuple[bytes, Reply]]:
        self.number += 1
        return self.board.handle(self.name, Request(self.number, self.settled, operation), now)

    def reply(self, operation: Operation, now: float = 0.0) -> Reply:
        return self.ask(operation, now)[0][1]

    def values(self, *keys: str) -> dict[str, bytes]:
        return self.reply(Wait(keys, True, "", 0.0)).values


class Replays(RuleBasedStateMachine):
    """Whatever is sent twice, and whenever the second comes, is carried out once."""

    def __init__(self) -> None:
        super().__init__()
        self.board = Blackboard(BoardLimits())
        self.askers = [Asker(self.board, name) for name in CLIENTS]
        self.sent: list[tuple[bytes, Request, list[tuple[bytes, Reply]]]] = []
        self.model: dict[str, bytes] = {}

    def send(self, who: int, operation: Operation) -> Reply:
        asker = self.askers[who]
        answers = asker.ask(operation)
        self.sent.append((asker.name, Request(asker.number, asker.settled, operation), answers))
        return answers[0][1]

    @rule(who=st.sampled_from([0, 1]), key=st.sampled_from(KEYS), value=st.binary(max_size=3))
    def put(self, who: int, key: str, value: bytes) -> None:
        self.send(who, Put(key, value))
        self.model[key] = value

    @rule(who=st.sampled_from([0, 1]), key=st.sampled_from(KEYS), value=st.binary(max_size=3))
    def put_first(self, who: int, key: str, value: bytes) -> None:
        reply = self.send(who, PutFirst(key, value))
        assert reply.values[key] == self.model.setdefault(key, value)

    @rule(who=st.sampled_from([0, 1]), amount=st.integers(-9, 9))
    def add(self, who: int, amount: int) -> None:
        total = int(self.model.get("count", b"0")) + amount
        assert self.send(who, Add("count", amount)).values["count"] == b"%d" % total
        self.model["count"] = b"%d" % total

    @rule(who=st.sampled_from([0, 1]), prefix=st.sampled_from(KEYS))
    def delete(self, who: int, prefix: str) -> None:
        self.send(who, DeletePrefix(prefix))
        self.model = {k: v for k, v in self.model.items() if not k.startswith(prefix)}

    @rule(who=st.sampled_from([0, 1]))
    def settle(self, who: int) -> None:
        self.askers[who].settled = self.askers[who].number

    @rule(choice=st.integers(0, 10**6))
    def replay(self, choice: int) -> None:
        """An old request comes again: nothing changes, the answer (if any) is the old one."""
        if not self.sent:
            return
        name, request, answers = self.sent[choice % len(self.sent)]
        again = self.board.handle(name, request, 0.0)
        assert again in ([], [answers[0]])

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        found = Asker(self.board, b"reader").values(*KEYS, "count")
        self.board.handle(b"reader", Request(2, 1, Leave()), 0.0)
        assert found == self.model
        assert self.board.total_bytes == sum(len(k) + len(v) for k, v in self.model.items())


TestReplays = Replays.TestCase
TestReplays.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_replay_oracle_can_fail() -> None:
    """Without the record of what was done, a repeated request counts twice."""
    board = Blackboard(BoardLimits())
    request = Request(1, 0, Add("n", 2))
    board.handle(b"c", request, 0.0)
    board._clients.clear()
    assert board.handle(b"c", request, 0.0)[0][1].values == {"n": b"4"}


def test_a_wait_is_answered_when_its_last_key_appears() -> None:
    board = Blackboard(BoardLimits())
    waiter, writer = Asker(board, b"w"), Asker(board, b"p")
    assert waiter.ask(Wait(("a", "b"), True, "", 9.0), now=1.0) == []
    assert [client for client, _ in writer.ask(Put("a", b"1"), now=2.0)] == [b"p"]
    answers = writer.ask(Put("b", b"2"), now=3.5)
    assert answers[1] == (b"w", Reply(1, {"a": b"1", "b": b"2"}, {"a": 1.5, "b": 0.0}))
    assert board.open_waits == 0


def test_a_wait_for_any_key_is_answered_by_the_first() -> None:
    board = Blackboard(BoardLimits())
    waiter, writer = Asker(board, b"w"), Asker(board, b"p")
    waiter.ask(Wait(("a", "b"), False, "", 9.0))
    assert writer.ask(Put("b", b"2"))[1][1].values == {"b": b"2"}


def test_the_unless_key_ends_a_wait() -> None:
    board = Blackboard(BoardLimits())
    waiter, writer = Asker(board, b"w"), Asker(board, b"p")
    waiter.ask(Wait(("a", "b"), True, "fault", 9.0))
    writer.ask(Put("a", b"1"))
    assert writer.ask(Put("fault", b"!"))[1][1].values == {"a": b"1", "fault": b"!"}
    assert waiter.reply(Wait(("zz",), True, "fault", 9.0)).values == {"fault": b"!"}


def test_a_wait_ends_with_what_is_there() -> None:
    board = Blackboard(BoardLimits())
    waiter = Asker(board)
    waiter.ask(Put("a", b"1"), now=0.0)
    assert waiter.ask(Wait(("a", "b"), True, "", 2.0), now=1.0) == []
    assert board.next_expiry() == 3.0
    assert board.expire(2.9) == []
    assert board.expire(3.0) == [(b"client", Reply(2, {"a": b"1"}, {"a": 3.0}))]
    assert board.next_expiry() is None


def test_a_key_that_is_deleted_is_waited_for_again() -> None:
    board = Blackboard(BoardLimits())
    waiter, writer = Asker(board, b"w"), Asker(board, b"p")
    writer.ask(Put("a", b"1"))
    waiter.ask(Wait(("a", "b"), True, "", 9.0))
    writer.ask(DeletePrefix("a"))
    assert len(writer.ask(Put("b", b"2"))) == 1
    assert writer.ask(Put("a", b"3"))[1][1].values == {"a": b"3", "b": b"2"}


@pytest.mark.parametrize("end", [Forget(1), Leave()])
def test_a_wait_that_nobody_waits_for_leaves_nothing(end: Operation) -> None:
    board = Blackboard(BoardLimits())
    waiter = Asker(board)
    waiter.ask(Wait(("a",), True, "b", 9.0))
    assert waiter.ask(end) == []
    assert (board.open_waits, board._waiters, board.next_expiry()) == (0, {}, None)


def test_expiries_of_answered_waits_do_not_pile_up() -> None:
    board = Blackboard(BoardLimits())
    asker = Asker(board)
    for _ in range(1000):
        asker.ask(Wait(("never",), True, "", 1e6))
        asker.ask(Forget(asker.number))
    assert len(board._expiries) < 100


@pytest.mark.parametrize(
    ("prepare", "operation", "text"),
    [
        ([], Put("k" * 11, b""), "a key of 11 characters; 1 to 10 are allowed"),
        ([], Put("", b""), "a key of 0 characters"),
        ([], Put("k", b"x" * 400), "the board is full: 'k' of 400 bytes does not fit"),
        ([Put(f"k{i}", b"") for i in range(5)], Put("k", b""), "the board is full: 5 keys"),
        ([Wait(("z",), True, "", 9)] * 3, Wait(("z",), True, "", 9), "3 waits are open"),
        ([Put("text", b"abc")], Add("text", 1), "key 'text' is no counter"),
        (
            [Put("a", b"x" * 150), Put("b", b"x" * 150)],
            Wait(("a", "b"), True, "", 0),
            "2 values of 302 bytes in one answer; the limit is 200",
        ),
    ],
)
def test_limits(prepare: list[Operation], operation: Operation, text: str) -> None:
    asker = Asker(Blackboard(SMALL))
    for each in prepare:
        for _, reply in asker.ask(each):
            assert not reply.error
    assert text in asker.reply(operation).error


def test_what_replaces_a_value_counts_by_the_difference() -> None:
    asker = Asker(Blackboard(SMALL))
    for size in (390, 100, 395):
        assert not asker.reply(Put("k", b"x" * size)).error


def test_the_client_silent_for_longest_is_forgotten() -> None:
    board = Blackboard(SMALL)
    for name in (b"a", b"b", b"c", b"d", b"a", b"e"):
        Asker(board, name).ask(Ping())
    assert board.clients == (b"c", b"d", b"a", b"e")
