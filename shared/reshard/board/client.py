"""A process's view of the control board: blocking calls, from any number of threads.

Every call is a request to the connection's thread and a wait for its answer. Not here: sockets
(`connection.py`).
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from reshard.board.connection import Connection
from reshard.board.deadline import Deadline
from reshard.board.invitation import Invitation
from reshard.board.messages import Add, DeletePrefix, Operation, Ping, Put, PutFirst, Reply, Wait
from reshard.errors import DeadlineExceeded, WireError
from reshard.wire import MAX_MESSAGE_BYTES

OPERATION_SECONDS = 60.0
"""How long a call that names no deadline may take."""

LOST_SECONDS = 10.0
"""How long a lost connection may stay lost; at most the deadline of a refit's phases."""

ANSWER_SECONDS = 2.0
"""How long after its deadline a wait still hopes for the board's list of what is there."""


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a wait for several keys.

    Attributes:
        values: of the keys that are there.
        ages: seconds since each of them was put, on the board's clock.
        missing: the keys that are not there.
    """

    values: dict[str, bytes]
    ages: dict[str, float]
    missing: tuple[str, ...]


class Watch:
    """A wait that its owner looks at from time to time, and ends when it likes."""

    def __init__(
        self, connection: Connection, keys: Sequence[str], number: int, answer: "Future[Reply]"
    ) -> None:
        self._connection = connection
        self._keys = tuple(keys)
        self._number = number
        self._answer = answer

    def found(self, seconds: float) -> Found | None:
        """What is there, once the wait is over; None if it is not after `seconds`.

        Raises:
            CancelledError: `end` was called.
            ReshardError: the connection has ended.
        """
        try:
            return _found(self._answer.result(seconds), self._keys)
        except FutureTimeout:
            return None

    def end(self) -> None:
        """Wait no longer; a thread in `found` returns at once. Harmless when repeated."""
        self._answer.cancel()
        self._connection.settle(self._number)


class BoardClient:
    """Reads and writes one run's board. Thread-safe; threads may wait at the same time.

    Every call raises `DeadlineExceeded` where the board does not answer in time, `WireError`
    where it refuses, and `PeerError` where it was closed (here or by the trainer).

    Attributes:
        address: of the board.
        host: host part of the address, without brackets.
    """

    def __init__(
        self, invitation: Invitation, deadline: Deadline, *, lost_seconds: float = LOST_SECONDS
    ) -> None:
        """Connect.

        Args:
            invitation: from `BoardServer.invitation`.
            deadline: for the connection.
            lost_seconds: how long a lost connection may stay lost before calls fail; a board that
                is silent for as long (10 s at most) is lost.

        Raises:
            DeadlineExceeded: nobody answers at the address.
            WireError: the board does not accept this invitation.
        """
        self.address = invitation.address
        self.host = invitation.host
        self._connection = Connection(invitation, lost_seconds)
        try:
            self._call(Ping(), deadline)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"BoardClient({self.address!r})"

    def __enter__(self) -> "BoardClient":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def put(self, key: str, value: bytes, deadline: Deadline | None = None) -> None:
        """Set `key`, replacing what it held."""
        _check_size(key, value)
        self._call(Put(key, value), deadline)

    def put_first(self, key: str, value: bytes, deadline: Deadline | None = None) -> bytes:
        """Set `key` if it is absent; the value that it then holds."""
        _check_size(key, value)
        return self._call(PutFirst(key, value), deadline).values[key]

    def add(self, key: str, amount: int, deadline: Deadline | None = None) -> int:
        """Add to a counter (absent: 0), once; the sum."""
        return int(self._call(Add(key, amount), deadline).values[key])

    def get(self, key: str, deadline: Deadline) -> bytes:
        """The value of `key`, once it is there."""
        return self.get_any((key,), deadline)[1]

    def get_any(self, keys: Sequence[str], deadline: Deadline) -> tuple[str, bytes]:
        """The first of `keys` (in their order) that is there, once one is."""
        found = self._wait(keys, deadline, every=False, unless="")
        for key in keys:
            if key in found.values:
                return key, found.values[key]
        raise DeadlineExceeded(
            f"nobody put {' or '.join(keys)} on the control board {self.address} within "
            f"{deadline.seconds:g} s"
        )

    def get_all(self, keys: Sequence[str], deadline: Deadline, unless: str = "") -> Found:
        """What is there of `keys` once all are, or once `unless` is, or at the deadline."""
        return self._wait(keys, deadline, every=True, unless=unless)

    def watch(self, keys: Sequence[str], unless: str = "") -> Watch:
        """Start a wait as `get_all` does, but without a deadline: the caller ends it."""
        number, answer = self._connection.ask(Wait(tuple(keys), True, unless, math.inf))
        return Watch(self._connection, keys, number, answer)

    def peek(self, key: str, deadline: Deadline | None = None) -> bytes | None:
        """The value of `key`, or None if it is absent."""
        return self.look((key,), deadline).values.get(key)

    def look(self, keys: Sequence[str], deadline: Deadline | None = None) -> Found:
        """What is there of `keys` now."""
        reply = self._call(Wait(tuple(keys), every=True, unless="", seconds=0.0), deadline)
        return _found(reply, keys)

    def delete_prefix(self, prefix: str, deadline: Deadline | None = None) -> None:
        """Remove every key that starts with `prefix` (end it with `/`: `a1` is also `a10`)."""
        self._call(DeletePrefix(prefix), deadline)

    def close(self) -> None:
        """Leave; calls that wait in other threads raise. Harmless when repeated."""
        self._connection.close()

    def _wait(self, keys: Sequence[str], deadline: Deadline, *, every: bool, unless: str) -> Found:
        wait = Wait(tuple(keys), every, unless, deadline.remaining())
        return _found(self._call(wait, deadline, grace=ANSWER_SECONDS), keys)

    def _call(self, operation: Operation, deadline: Deadline | None, grace: float = 0.0) -> Reply:
        until = deadline or Deadline.after(OPERATION_SECONDS)
        number, answer = self._connection.ask(operation)
        seconds = until.remaining() + grace
        try:
            reply = answer.result(None if math.isinf(seconds) else seconds)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"the control board at {self.address} did not answer within {until.seconds:g} s "
                f"({self._connection.condition}); does the trainer live, and is the address "
                "reached from here?"
            ) from None
        finally:
            self._connection.settle(number)
        if reply.error:
            raise WireError(f"the control board at {self.address} refused: {reply.error}")
        return reply


def _found(reply: Reply, keys: Sequence[str]) -> Found:
    missing = tuple(key for key in keys if key not in reply.values)
    return Found(reply.values, reply.ages, missing)


def _check_size(key: str, value: bytes) -> None:
    if len(value) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"{key!r}: a value of {len(value)} bytes; the board takes {MAX_MESSAGE_BYTES} at most"
        )
