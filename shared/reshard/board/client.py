"""A client of the board. Thread-safe: every call in flight has a socket of its own."""

import itertools
import threading
from collections.abc import Sequence
from typing import Final

import zmq

from reshard.board.deadline import Deadline
from reshard.board.invitation import Invitation
from reshard.board.messages import MAX_FRAME_BYTES, Reply, Request
from reshard.errors import DeadlineExceeded, ReshardError, WireError
from reshard.wire import decode, encode

_SLICE_MILLISECONDS: Final = 100
_CALL_SECONDS: Final = 30.0


class BoardClient:
    """Puts values on a board and waits for values of others.

    Calls are idempotent, so a caller may repeat one that ran into its deadline.
    """

    def __init__(self, invitation: Invitation, deadline: Deadline | None = None) -> None:
        """Join the board of `invitation`.

        Raises:
            DeadlineExceeded: the board does not answer, or does not admit these keys.
        """
        self.address = invitation.address
        self._invitation = invitation
        self._context = zmq.Context()
        self._idle: list[zmq.Socket[bytes]] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._busy = 0
        self._closed = False
        try:
            self.peek("", deadline or Deadline.after(_CALL_SECONDS))
        except WireError:
            pass  # An empty key is refused, by a board that has let us in.
        except ReshardError:
            self.close()
            raise

    def put(self, key: str, value: bytes, deadline: Deadline | None = None) -> None:
        """Set `key`, overwriting."""
        self._call("put", (key,), deadline, value=value)

    def put_first(self, key: str, value: bytes, deadline: Deadline | None = None) -> bytes:
        """Set `key` if it is absent; the value that stands."""
        return self._call("put_first", (key,), deadline, value=value).value or b""

    def count(self, key: str, amount: int, deadline: Deadline | None = None) -> int:
        """Add `amount` to the counter `key`; its new value. The one call that is not idempotent."""
        return int(self._call("count", (key,), deadline, amount=amount).value or b"0")

    def peek(self, key: str, deadline: Deadline | None = None) -> bytes | None:
        """The value of `key`, or None."""
        return self._call("peek", (key,), deadline).value

    def get(self, key: str, deadline: Deadline) -> bytes:
        """Wait for `key`.

        Raises:
            DeadlineExceeded: nobody has put it in time.
        """
        return self.get_any((key,), deadline)[1]

    def get_any(self, keys: Sequence[str], deadline: Deadline) -> tuple[str, bytes]:
        """Wait for the first of `keys`; earlier ones win if several are there.

        Raises:
            DeadlineExceeded: nobody has put any of them in time.
        """
        reply = self._call("wait", tuple(keys), deadline)
        return reply.key, reply.value or b""

    def delete_prefix(self, prefix: str, deadline: Deadline | None = None) -> None:
        """Remove every key that starts with `prefix`."""
        self._call("delete", (prefix,), deadline)

    def close(self) -> None:
        """Leave; calls that still wait raise."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            last = self._busy == 0
        for held in idle:
            held.close(linger=0)
        if last:
            self._context.term()

    def _call(
        self,
        call: str,
        keys: tuple[str, ...],
        deadline: Deadline | None,
        value: bytes = b"",
        amount: int = 0,
    ) -> Reply:
        deadline = deadline or Deadline.after(_CALL_SECONDS)
        number = next(self._numbers)
        request = Request(number, call, keys, value, deadline.remaining(), amount)  # type: ignore[arg-type]
        held = self._take()
        reply: Reply | None = None
        try:
            held.send(encode(request))
            reply = self._await(held, number, deadline)
        finally:
            self._give_back(held, answered=reply is not None)
        if reply is None:
            raise DeadlineExceeded(
                f"nothing under {', '.join(keys) or 'the board'} at the control board "
                f"{self.address} within {deadline.seconds:g} s"
            )
        if reply.error:
            raise WireError(f"the control board {self.address} refused: {reply.error}")
        return reply

    def _await(self, held: "zmq.Socket[bytes]", number: int, deadline: Deadline) -> Reply | None:
        while not self._closed:
            left = min(_SLICE_MILLISECONDS, int(deadline.remaining() * 1000) + 1)
            if held.poll(left):
                reply = decode(held.recv(), Reply, limit=MAX_FRAME_BYTES)
                if reply.number == number:
                    return reply
            elif deadline.expired:
                return None
        raise ReshardError(f"the client of the control board {self.address} was closed")

    def _take(self) -> "zmq.Socket[bytes]":
        with self._lock:
            if self._closed:
                raise ReshardError(f"the client of the control board {self.address} is closed")
            self._busy += 1
            if self._idle:
                return self._idle.pop()
        fresh: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        fresh.curve_serverkey = self._invitation.server_key.encode()
        fresh.curve_publickey = self._invitation.client_key.encode()
        fresh.curve_secretkey = self._invitation.client_secret.encode()
        fresh.maxmsgsize = MAX_FRAME_BYTES
        fresh.linger = 0
        fresh.ipv6 = "[" in self.address
        fresh.connect(self.address)
        return fresh

    def _give_back(self, held: "zmq.Socket[bytes]", *, answered: bool) -> None:
        """Keep the socket for the next call, unless a late answer may still come on it."""
        with self._lock:
            self._busy -= 1
            keep = answered and not self._closed
            if keep:
                self._idle.append(held)
            last = self._closed and self._busy == 0
        if not keep:
            held.close(linger=0)
        if last:
            self._context.term()
