"""One client's connection to the board: the thread that owns its sockets.

ZeroMQ sockets belong to one thread, so callers queue requests and hold futures. A connection that
was cut is made again by libzmq; requests without an answer are then sent again, and the board
carries each out once.
"""

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from reshard.board.invitation import Invitation
from reshard.board.messages import Forget, Leave, Operation, Reply, Request
from reshard.errors import DeadlineExceeded, PeerError, ReshardError, WireError
from reshard.wire import MAX_MESSAGE_BYTES, decode, encode

_HEARTBEAT_MS = 2_000
_SILENCE_MS = 10_000
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1_000
_LINGER_MS = 200
_FRAME_OVERHEAD = 64 * 2**10


@dataclass(slots=True)
class _Pending:
    frame: bytes
    answer: "Future[Reply]"


class Connection:
    """Asks the board and hands out futures of its answers.

    Attributes:
        address: of the board.
        condition: how the connection stands, in words, for messages.
    """

    def __init__(self, invitation: Invitation, lost_seconds: float) -> None:
        self.address = invitation.address
        self.condition = "never connected"
        self._lost_seconds = lost_seconds
        self._lost_at: float | None = None
        self._lock = threading.Lock()
        self._last_number = 0
        self._pending: dict[int, _Pending] = {}
        self._outbox: deque[bytes] = deque()
        self._end: Callable[[], ReshardError] | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._configure(invitation)
        self._monitor = self._socket.get_monitor_socket()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        try:
            self._socket.connect(invitation.address)
        except zmq.ZMQError as error:
            self._release()
            raise WireError(f"no control board can be at {self.address!r}: {error}") from error
        self._thread = threading.Thread(target=self._run, name="reshard-board-client", daemon=True)
        self._thread.start()

    def ask(self, operation: Operation) -> "tuple[int, Future[Reply]]":
        """Queue a request; its number and the future of its answer.

        Raises:
            ReshardError: the connection has ended.
        """
        answer: Future[Reply] = Future()
        with self._lock:
            if self._end is not None:
                raise self._end()
            self._last_number += 1
            number = self._last_number
            settled = min(self._pending, default=number) - 1
            frame = encode(Request(number, settled, operation))
            self._pending[number] = _Pending(frame, answer)
            self._outbox.append(frame)
        self._wake()
        return number, answer

    def settle(self, number: int) -> None:
        """Nobody waits for this answer any more; the board is told if it never came."""
        with self._lock:
            pending = self._pending.pop(number, None)
            if self._end is not None or pending is None or _answered(pending.answer):
                return
            self._last_number += 1
            settled = min(self._pending, default=self._last_number) - 1
            self._outbox.append(encode(Request(self._last_number, settled, Forget(number))))
        self._wake()

    def close(self) -> None:
        """Leave the board; every waiting caller gets an error."""
        self._finish(PeerError, f"the connection to the control board {self.address} was closed")
        self._wake()
        self._thread.join()

    def _configure(self, invitation: Invitation) -> None:
        dealer = self._socket
        dealer.routing_id = b"c" + os.urandom(16)
        try:
            dealer.curve_serverkey = invitation.server_key.encode()
            dealer.curve_publickey = invitation.client_key.encode()
            dealer.curve_secretkey = invitation.client_secret.encode()
        except (zmq.ZMQError, ValueError):
            self._context.destroy(linger=0)
            raise WireError(
                f"the invitation to {self.address} holds keys that are no CURVE keys"
            ) from None
        dealer.ipv6 = True
        dealer.maxmsgsize = MAX_MESSAGE_BYTES + _FRAME_OVERHEAD
        dealer.sndhwm = 0
        dealer.linger = _LINGER_MS
        # A board whose process was stopped keeps its connections: only its silence tells.
        silence = min(_SILENCE_MS, max(1, int(1000 * self._lost_seconds)))
        dealer.heartbeat_ivl = min(_HEARTBEAT_MS, max(1, silence // 4))
        dealer.heartbeat_timeout = silence
        dealer.reconnect_ivl = _RECONNECT_MS
        dealer.reconnect_ivl_max = _RECONNECT_MAX_MS

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"w")
        except OSError:
            # Full: the thread is about to wake anyway. Closed: it has ended.
            return

    def _run(self) -> None:
        poller = zmq.Poller()
        for readable in (self._socket, self._monitor, self._wake_reader):
            poller.register(readable, zmq.POLLIN)
        try:
            while self._end is None:
                ready = dict(poller.poll(1000 if self._lost_at is not None else None))
                if self._wake_reader.fileno() in ready:
                    self._wake_reader.recv(4096)
                if self._monitor in ready:
                    self._note_events()
                self._send_queued()
                if self._socket in ready:
                    self._receive()
                self._check_lost()
            self._leave()
        except Exception as error:
            self._finish(WireError, f"the connection to {self.address} failed: {error}")
        finally:
            self._release()

    def _note_events(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._finish(
                    WireError,
                    f"the control board at {self.address} does not accept this invitation: it "
                    "belongs to another run; ask the trainer for a new one",
                )
            elif event == zmq.EVENT_DISCONNECTED:
                self._lose("connection lost")
            elif event == zmq.EVENT_CONNECT_RETRIED and self._lost_at is None:
                self.condition = "nobody listens there, or not for this invitation"

    def _connected(self) -> None:
        self.condition = "connected"
        self._lost_at = None
        with self._lock:
            # What was queued for the first time goes out once, in order.
            self._outbox.clear()
            self._outbox.extend(pending.frame for pending in self._pending.values())

    def _lose(self, how: str) -> None:
        if self.condition == "connected":
            self.condition = how
            self._lost_at = time.monotonic()

    def _check_lost(self) -> None:
        if self._lost_at is None or time.monotonic() - self._lost_at < self._lost_seconds:
            return
        with self._lock:
            pending = list(self._pending.values())
        for each in pending:
            error = DeadlineExceeded(
                f"the control board at {self.address} has been unreachable for "
                f"{self._lost_seconds:g} s; the trainer is gone, or the network"
            )
            _fail(each.answer, error)

    def _send_queued(self) -> None:
        if self.condition != "connected":
            return
        while True:
            with self._lock:
                if not self._outbox:
                    return
                frame = self._outbox.popleft()
            if not self._send(frame):
                # It is still pending: sent again once the board answers, failed when it does not.
                self._lose("connection lost")
                return

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = decode(frames[-1], Reply, limit=MAX_MESSAGE_BYTES + _FRAME_OVERHEAD)
            if reply.number == 0:
                self._finish(PeerError, f"the trainer has closed the control board {self.address}")
                return
            with self._lock:
                pending = self._pending.get(reply.number)
            if pending is not None:
                with contextlib.suppress(InvalidStateError):
                    pending.answer.set_result(reply)

    def _finish(self, kind: type[ReshardError], why: str) -> None:
        """End the connection: the first reason stands."""
        with self._lock:
            if self._end is None:
                # Made anew for each caller: a shared exception would collect their tracebacks.
                self._end = partial(kind, why)
            end = self._end
            pending = list(self._pending.values())
        for each in pending:
            _fail(each.answer, end())

    def _leave(self) -> None:
        if self.condition == "connected":
            with self._lock:
                number = self._last_number + 1
            self._send(encode(Request(number, number - 1, Leave())))

    def _send(self, frame: bytes) -> bool:
        """Whether libzmq took the frame.

        Where a handshake was turned down it takes none, for good, before its event is read: a send
        that waits would never return.
        """
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _release(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()


def _answered(answer: "Future[Reply]") -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is None


def _fail(answer: "Future[Reply]", error: ReshardError) -> None:
    with contextlib.suppress(InvalidStateError):
        answer.set_exception(error)
