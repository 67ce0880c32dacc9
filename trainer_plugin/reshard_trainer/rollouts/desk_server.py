"""The desk for producers on other machines: an authenticated, encrypted socket (ZeroMQ, CURVE).

Only who holds the invitation gets past the handshake. What a producer has in hand is leased: one
that falls silent loses it, and its prompts are asked again. Not here: the rules (`desk.py`).
"""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Final

import zmq
import zmq.asyncio

from reshard.board import Invitation
from reshard.board.addresses import interfaces, listening_address, tcp
from reshard.board.admission import Admission
from reshard.errors import ReshardError, WireError
from reshard.wire import decode, encode
from reshard_trainer.rollouts.clock import now
from reshard_trainer.rollouts.desk_messages import (
    Assign,
    Deliver,
    DeskReply,
    DeskRequest,
    GiveUp,
    Leave,
    News,
)
from reshard_trainer.rollouts.desk_service import Desk
from reshard_trainer.rollouts.gate import Ticket

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 64 * 2**20
LEASE_SECONDS: Final = 30.0

_MAX_PRODUCERS: Final = 10_000
_MAX_WAIT_SECONDS: Final = 60.0
_HEARTBEAT_MS: Final = 2_000
_SILENCE_MS: Final = 10_000
_LINGER_MS: Final = 300


@dataclass(slots=True)
class _Producer:
    """What is remembered of one producer.

    Invariant: `done` holds the replies to the requests numbered above `settled`.
    """

    heard_at: float
    settled: int = 0
    done: dict[int, DeskReply] = field(default_factory=dict)
    pending: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    tickets: set[Ticket] = field(default_factory=set)


class DeskServer:
    """Serves a desk until closed; made and closed on the desk's event loop.

    Attributes:
        invitation: how to reach it; holds a secret.
    """

    def __init__(
        self, desk: Desk, host: str = "127.0.0.1", *, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        """Listen on `host`, on a port that the system chooses.

        Args:
            desk: whose.
            host: an address (IPv6 with or without brackets), host name or interface name.
            lease_seconds: how long a producer may be silent before it loses what it has in hand.

        Raises:
            ReshardError: `host` is not an address of this machine, or stands for all of them.
        """
        self._desk = desk
        self._lease_seconds = lease_seconds
        self._producers: dict[bytes, _Producer] = {}
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._admission = Admission(self._context, client_public)
        self._router = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.ROUTER)
        try:
            address = self._listen(host, server_secret)
        except BaseException:
            self._release()
            raise
        self.invitation = Invitation(
            address, server_public.decode(), client_public.decode(), client_secret.decode()
        )
        self._tasks = [
            asyncio.create_task(self._admit()),
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._end_leases()),
        ]

    async def close(self) -> None:
        """Tell every producer and stop serving; what they have in hand is asked again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in tuple(self._producers):
            await self._send(client, DeskReply(0))
            await self._forget(client, "the desk closed")
        self._release()

    def _listen(self, host: str, server_secret: bytes) -> str:
        router = self._router
        router.curve_server = True
        router.curve_secretkey = server_secret
        router.zap_domain = b"reshard"
        router.maxmsgsize = MAX_MESSAGE_BYTES
        router.router_mandatory = True
        router.router_handover = True
        router.linger = _LINGER_MS
        router.heartbeat_ivl = _HEARTBEAT_MS
        router.heartbeat_timeout = _SILENCE_MS
        name = host if host in interfaces() else listening_address(host)
        router.ipv6 = ":" in name
        try:
            router.bind(tcp(name, "*"))
        except zmq.ZMQError as error:
            raise ReshardError(
                f"the desk cannot listen on {host!r} ({name}): {error}; name an address of this "
                f"machine or an interface: {', '.join(interfaces())}"
            ) from error
        return str(router.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    async def _admit(self) -> None:
        """Decide on who gets past the handshake."""
        poller = zmq.asyncio.Poller()
        poller.register(self._admission.socket, zmq.POLLIN)
        while True:
            await poller.poll()
            self._admission.decide()

    async def _receive(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 2:
                logger.warning("desk: dropped a message of %d frames", len(frames))
                continue
            client, raw = frames
            try:
                request = decode(raw, DeskRequest, limit=MAX_MESSAGE_BYTES)
            except (WireError, ReshardError) as error:
                logger.warning("desk: dropped a message: %s", error)
                continue
            await self._handle(client, request)

    async def _handle(self, client: bytes, request: DeskRequest) -> None:
        """Carry out one request, once however often it comes."""
        if client not in self._producers and len(self._producers) >= _MAX_PRODUCERS:
            logger.warning("desk: %d producers; no room for more", len(self._producers))
            return
        producer = self._producers.setdefault(client, _Producer(now()))
        producer.heard_at = now()
        if request.settled > producer.settled:
            producer.settled = request.settled
            producer.done = {n: r for n, r in producer.done.items() if n > request.settled}
        if isinstance(request.operation, Leave):
            await self._forget(client, "its producer left")
        elif request.number in producer.done:
            await self._send(client, producer.done[request.number])
        elif request.number > producer.settled and request.number not in producer.pending:
            task = asyncio.create_task(self._answer(client, producer, request))
            producer.pending[request.number] = task

    async def _answer(self, client: bytes, producer: _Producer, request: DeskRequest) -> None:
        try:
            reply = await self._carry_out(producer, request)
        except ReshardError as error:
            reply = DeskReply(request.number, error=str(error))
        except Exception:
            logger.exception("desk: a request failed")
            reply = DeskReply(request.number, error="the desk failed on this request")
        finally:
            del producer.pending[request.number]
        producer.done[request.number] = reply
        await self._send(client, reply)

    async def _carry_out(self, producer: _Producer, request: DeskRequest) -> DeskReply:
        number = request.number
        match request.operation:
            case Assign(engine, version, seconds):
                given = await self._desk.assign(engine, version, _bounded(seconds))
                if given is not None:
                    producer.tickets.add(given.ticket)
                return DeskReply(number, assignment=given)
            case Deliver(group):
                producer.tickets.discard(Ticket(group.serial, group.attempt))
                return DeskReply(number, verdict=await self._desk.deliver(group))
            case GiveUp(ticket, reason, charge):
                producer.tickets.discard(ticket)
                await self._desk.give_up(ticket, reason, charge)
                return DeskReply(number)
            case News(known, tickets, seconds):
                standing = await self._desk.news(known, tickets, _bounded(seconds))
                producer.tickets -= standing.ended
                return DeskReply(number, standing=standing)
            case Leave():
                raise AssertionError("handled before")

    async def _send(self, client: bytes, reply: DeskReply) -> None:
        try:
            await self._router.send_multipart((client, encode(reply)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # It is gone, or does not read: it asks again once it is back.
            logger.debug("desk: an answer was not delivered: %s", error)

    async def _end_leases(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 4)
            silent = [
                client
                for client, producer in self._producers.items()
                if now() - producer.heard_at > self._lease_seconds
            ]
            for client in silent:
                await self._forget(client, f"its producer was silent for {self._lease_seconds:g} s")

    async def _forget(self, client: bytes, reason: str) -> None:
        producer = self._producers.pop(client)
        pending = tuple(producer.pending.values())
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for ticket in producer.tickets:
            await self._desk.give_up(ticket, reason, 0)

    def _release(self) -> None:
        self._router.close()
        self._admission.close()
        self._context.term()


def _bounded(seconds: float) -> float:
    return min(max(0.0, seconds), _MAX_WAIT_SECONDS)
