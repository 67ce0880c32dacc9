"""The board's server: one thread, one socket, one dictionary.

Only holders of the run's key pair get past ZeroMQ's handshake; what they send is decoded into
`Request` or dropped. Not here: what the keys mean.
"""

import contextlib
import logging
import socket
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from reshard.board.deadline import Deadline
from reshard.board.invitation import Invitation
from reshard.board.messages import (
    MAX_FRAME_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_TOTAL_BYTES,
    Reply,
    Request,
)
from reshard.errors import ReshardError, WireError
from reshard.wire import decode, encode

logger = logging.getLogger(__name__)

_POLL_MILLISECONDS: Final = 200


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A client that waits for one of `keys`."""

    client: bytes
    number: int
    keys: tuple[str, ...]
    deadline: Deadline


class BoardServer:
    """Serves a board until closed; the port is chosen by binding.

    Attributes:
        invitation: for every process that shall join.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Bind to `host` (a name or address of this machine; loopback by default).

        Raises:
            ReshardError: `host` cannot be bound.
        """
        server_key, server_secret = zmq.curve_keypair()
        client_key, client_secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _Admission(client_key))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = server_secret
        self._socket.maxmsgsize = MAX_FRAME_BYTES
        self._socket.linger = 0
        try:
            address = self._bind(host)
        except (OSError, zmq.ZMQError) as error:
            self._release()
            raise ReshardError(f"the control board cannot listen on {host!r}: {error}") from error
        self.invitation = Invitation(
            address, server_key.decode(), client_key.decode(), client_secret.decode()
        )
        self._values: dict[str, bytes] = {}
        self._nbytes = 0
        self._waiters: dict[str, list[_Waiter]] = defaultdict(list)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="reshard-board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; clients run into their deadlines."""
        self._stop.set()
        self._thread.join()

    def _bind(self, host: str) -> str:
        family, *_, where = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        literal = str(where[0])
        if family == socket.AF_INET6:
            self._socket.ipv6 = True
            literal = f"[{literal}]"
        port = self._socket.bind_to_random_port(f"tcp://{literal}")
        return f"tcp://{literal}:{port}"

    def _release(self) -> None:
        self._socket.close()
        self._authenticator.stop()
        self._context.term()

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                if self._socket.poll(_POLL_MILLISECONDS):
                    self._take(self._socket.recv_multipart())
                else:
                    self._forget_expired()
        finally:
            self._release()

    def _take(self, frames: list[bytes]) -> None:
        client = frames[0]
        try:
            if len(frames) != 2:
                raise WireError(f"{len(frames) - 1} frames where one was expected")
            request = decode(frames[1], Request, limit=MAX_FRAME_BYTES)
        except WireError as error:
            logger.warning("reshard: the board dropped a message: %s", error)
            return
        try:
            self._check(request)
            self._answer(client, request)
        except WireError as error:
            self._reply(client, Reply(request.number, error=str(error)))

    def _check(self, request: Request) -> None:
        if not request.keys or any(len(k.encode()) > MAX_KEY_BYTES for k in request.keys):
            raise WireError(f"a {request.call} needs keys of 1 to {MAX_KEY_BYTES} bytes")
        adding = request.call in ("put", "put_first", "count")
        if adding and request.keys[0] not in self._values and len(self._values) >= MAX_KEYS:
            raise WireError(f"the board holds {MAX_KEYS} keys, its limit")
        if adding and self._nbytes + len(request.value) > MAX_TOTAL_BYTES:
            raise WireError(f"the board holds {self._nbytes} bytes, near its limit")

    def _answer(self, client: bytes, request: Request) -> None:
        key = request.keys[0]
        match request.call:
            case "put":
                self._set(key, request.value)
                self._reply(client, Reply(request.number, key))
            case "put_first":
                if key not in self._values:
                    self._set(key, request.value)
                self._reply(client, Reply(request.number, key, self._values[key]))
            case "count":
                total = int(self._values.get(key, b"0")) + request.amount
                self._set(key, str(total).encode())
                self._reply(client, Reply(request.number, key, self._values[key]))
            case "peek":
                self._reply(client, Reply(request.number, key, self._values.get(key)))
            case "delete":
                for held in [held for held in self._values if held.startswith(key)]:
                    self._nbytes -= len(self._values.pop(held))
                self._reply(client, Reply(request.number, key))
            case "wait":
                self._wait(client, request)

    def _wait(self, client: bytes, request: Request) -> None:
        for key in request.keys:
            if key in self._values:
                self._reply(client, Reply(request.number, key, self._values[key]))
                return
        waiter = _Waiter(client, request.number, request.keys, Deadline.after(request.seconds))
        for key in request.keys:
            self._waiters[key].append(waiter)

    def _set(self, key: str, value: bytes) -> None:
        self._nbytes += len(value) - len(self._values.get(key, b""))
        self._values[key] = value
        for waiter in self._waiters.pop(key, []):
            self._reply(waiter.client, Reply(waiter.number, key, value))
            self._drop(waiter)

    def _drop(self, waiter: _Waiter) -> None:
        for key in waiter.keys:
            with contextlib.suppress(ValueError):
                self._waiters[key].remove(waiter)
            if not self._waiters[key]:
                del self._waiters[key]

    def _forget_expired(self) -> None:
        late = {w for waiters in self._waiters.values() for w in waiters if w.deadline.expired}
        for waiter in late:
            self._drop(waiter)

    def _reply(self, client: bytes, reply: Reply) -> None:
        # ROUTER drops what it cannot deliver: a client that is gone costs nothing.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([client, encode(reply)], flags=zmq.NOBLOCK)


class _Admission:
    """Admits exactly one client key."""

    def __init__(self, client_key: bytes) -> None:
        self._client_key = client_key

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the holder of `key` may enter."""
        del domain
        return key == self._client_key
