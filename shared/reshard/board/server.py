"""The board's server: a ROUTER socket under CURVE, in a background thread of trainer rank 0.

Only holders of the run's client key get past the handshake (ZAP); what they send is decoded as
typed MessagePack with limits, and dropped with a log line where it does not decode. Logs never
hold keys or values.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterable

import zmq

from reshard.board.addresses import interfaces, listening_address, tcp
from reshard.board.admission import Admission
from reshard.board.blackboard import Blackboard, BoardLimits, Delivery
from reshard.board.invitation import Invitation
from reshard.board.messages import Reply, Request
from reshard.errors import ReshardError, WireError
from reshard.wire import decode, encode

logger = logging.getLogger(__name__)

_HEARTBEAT_MS = 2_000
_SILENCE_MS = 10_000
_FRAME_OVERHEAD = 64 * 2**10
_QUEUED_REPLIES = 1_000
_LINGER_MS = 300


class BoardServer:
    """Serves one run's board until closed.

    Attributes:
        invitation: how to join; holds the run's secret.
    """

    def __init__(self, host: str = "127.0.0.1", *, limits: BoardLimits | None = None) -> None:
        """Listen on `host`, on a port that the system chooses.

        Args:
            host: an address (IPv6 with or without brackets), host name or interface name.
            limits: what the board accepts at most.

        Raises:
            ReshardError: `host` is not an address of this machine, or stands for all of them.
        """
        self._limits = limits or BoardLimits()
        self._board = Blackboard(self._limits)
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._admission = Admission(self._context, client_public)
        self._router = self._context.socket(zmq.ROUTER)
        self._wake_reader, self._wake_writer = socket.socketpair()
        try:
            endpoint = self._listen(host, server_secret)
        except BaseException:
            self._release()
            raise
        self.invitation = Invitation(
            endpoint, server_public.decode(), client_public.decode(), client_secret.decode()
        )
        self._thread = threading.Thread(target=self._serve, name="reshard-board", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"BoardServer({self.invitation.address!r})"

    def __enter__(self) -> "BoardServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Tell every client and stop serving. Harmless when repeated."""
        # An OSError means that the thread has ended and released its sockets.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"c")
        self._thread.join()

    def _listen(self, host: str, server_secret: bytes) -> str:
        router = self._router
        router.curve_server = True
        router.curve_secretkey = server_secret
        router.zap_domain = b"reshard"
        router.maxmsgsize = self._limits.message_bytes + _FRAME_OVERHEAD
        router.router_mandatory = True
        router.router_handover = True
        router.sndhwm = _QUEUED_REPLIES
        router.linger = _LINGER_MS
        router.heartbeat_ivl = _HEARTBEAT_MS
        router.heartbeat_timeout = _SILENCE_MS
        name = host if host in interfaces() else listening_address(host)
        router.ipv6 = ":" in name
        try:
            router.bind(tcp(name, "*"))
        except zmq.ZMQError as error:
            raise ReshardError(
                f"the control board cannot listen on {host!r} ({name}): {error}; name an address "
                f"of this machine or an interface: {', '.join(interfaces())}"
            ) from error
        return str(router.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    def _serve(self) -> None:
        poller = zmq.Poller()
        for readable in (self._router, self._admission.socket, self._wake_reader):
            poller.register(readable, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(self._poll_milliseconds()))
                if self._wake_reader.fileno() in ready:
                    break
                if self._admission.socket in ready:
                    self._admission.decide()
                if self._router in ready:
                    self._receive()
                self._deliver(self._board.expire(time.monotonic()))
            self._deliver((client, Reply(0)) for client in self._board.clients)
        finally:
            self._release()

    def _poll_milliseconds(self) -> int | None:
        at = self._board.next_expiry()
        if at is None:
            return None
        return min(60_000, max(0, int((at - time.monotonic()) * 1000) + 1))

    def _receive(self) -> None:
        """Handle what has come, at most a batch, so that other sockets get their turn."""
        for _ in range(100):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                logger.warning("control board: receiving failed: %s", error)
                return
            self._handle(frames)

    def _handle(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            logger.warning("control board: dropped a message of %d frames", len(frames))
            return
        client, raw = frames
        try:
            request = decode(raw, Request, limit=self._limits.message_bytes + _FRAME_OVERHEAD)
        except WireError as error:
            logger.warning("control board: dropped a message: %s", error)
            return
        try:
            due = self._board.handle(client, request, time.monotonic())
        except Exception:
            logger.exception("control board: a request failed")
            due = [(client, Reply(request.number, error="the board failed on this request"))]
        self._deliver(due)

    def _deliver(self, due: Iterable[Delivery]) -> None:
        for client, reply in due:
            try:
                self._router.send_multipart((client, encode(reply)), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # It is gone, or does not read: it asks again once it is back.
                logger.debug("control board: an answer was not delivered: %s", error)

    def _release(self) -> None:
        self._router.close()
        self._admission.close()
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()
