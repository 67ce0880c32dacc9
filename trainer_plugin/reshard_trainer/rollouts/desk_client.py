"""The desk, seen from a producer on another machine.

Requests without an answer are sent again; the desk acts once on each. A desk that stays silent is
an error in every call that waits. Not here: what is asked for (`producer.py`).
"""

import asyncio
import contextlib
import itertools
import os
from typing import Final

import zmq
import zmq.asyncio

from reshard.board import Invitation
from reshard.errors import DeadlineExceeded, PeerError, WireError
from reshard.ids import PolicyVersion
from reshard.wire import decode, encode
from reshard_trainer.rollouts.buffer import Verdict
from reshard_trainer.rollouts.clock import now
from reshard_trainer.rollouts.desk import Assignment
from reshard_trainer.rollouts.desk_messages import (
    Assign,
    Deliver,
    DeskReply,
    DeskRequest,
    GiveUp,
    Leave,
    News,
    Operation,
)
from reshard_trainer.rollouts.desk_server import MAX_MESSAGE_BYTES
from reshard_trainer.rollouts.desk_service import Standing
from reshard_trainer.rollouts.errors import RolloutError
from reshard_trainer.rollouts.gate import Ticket
from reshard_trainer.rollouts.rollout import EngineName, RolloutGroup

_RESEND_SECONDS: Final = 2.0
_HEARTBEAT_MS: Final = 2_000
_SILENCE_MS: Final = 10_000
_LINGER_MS: Final = 300


class RemoteDesk:
    """`Desk` says what each call promises; made and closed on one event loop."""

    def __init__(self, invitation: Invitation, *, lost_seconds: float = 60.0) -> None:
        """Connect.

        Args:
            invitation: from `DeskServer.invitation`.
            lost_seconds: how long the desk may be silent before calls fail.

        Raises:
            WireError: no desk can be there, or the invitation holds no keys.
        """
        self.address = invitation.address
        self._lost_seconds = lost_seconds
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[bytes, asyncio.Future[DeskReply]]] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._end = ""
        self._heard_at = now()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        try:
            self._connect(invitation)
        except (zmq.ZMQError, ValueError):
            self._release()
            raise WireError(
                f"no desk can be reached at {invitation.address!r} with these keys"
            ) from None
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._insist()),
        ]

    async def assign(
        self, engine: EngineName, version: PolicyVersion, seconds: float
    ) -> Assignment | None:
        """A prompt for an engine at this version."""
        asking = asyncio.create_task(self._ask(Assign(engine, version, seconds)))
        try:
            return (await asyncio.shield(asking)).assignment
        except asyncio.CancelledError:
            # The desk may have assigned a prompt by now: it must not be lost.
            asking.add_done_callback(self._return)
            raise

    async def deliver(self, group: RolloutGroup) -> Verdict:
        """Hand in the group of an assignment."""
        verdict = (await self._ask(Deliver(group))).verdict
        if verdict is None:
            raise WireError(f"the desk at {self.address} gave no verdict on {group.serial}")
        return verdict

    async def give_up(self, ticket: Ticket, reason: str, charge: int) -> None:
        """End an assignment without a group."""
        await self._ask(GiveUp(ticket, reason, charge))

    async def news(
        self, known: PolicyVersion | None, tickets: frozenset[Ticket], seconds: float
    ) -> Standing:
        """What is new."""
        standing = (await self._ask(News(known, tickets, seconds))).standing
        if standing is None:
            raise WireError(f"the desk at {self.address} gave no news")
        return standing

    async def close(self) -> None:
        """Leave; what is in hand is asked again."""
        for task in (*self._tasks, *self._returning):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._returning, return_exceptions=True)
        self._end = self._end or f"the connection to the desk {self.address} was closed"
        self._fail(PeerError(self._end))
        number = next(self._numbers)
        await self._send(encode(DeskRequest(number, number - 1, Leave())))
        self._release()

    def _connect(self, invitation: Invitation) -> None:
        dealer = self._socket
        dealer.routing_id = b"p" + os.urandom(16)
        dealer.curve_serverkey = invitation.server_key.encode()
        dealer.curve_publickey = invitation.client_key.encode()
        dealer.curve_secretkey = invitation.client_secret.encode()
        dealer.ipv6 = True
        dealer.maxmsgsize = MAX_MESSAGE_BYTES
        dealer.linger = _LINGER_MS
        dealer.heartbeat_ivl = _HEARTBEAT_MS
        dealer.heartbeat_timeout = _SILENCE_MS
        dealer.connect(invitation.address)

    async def _ask(self, operation: Operation) -> DeskReply:
        number = next(self._numbers)
        settled = min(self._pending, default=number) - 1
        frame = encode(DeskRequest(number, settled, operation))
        if len(frame) > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {len(frame)} bytes is over the desk's limit")
        answer: asyncio.Future[DeskReply] = asyncio.get_running_loop().create_future()
        if self._end:
            # Whoever asks later learns the same reason as who waited when it ended.
            raise PeerError(self._end)
        self._pending[number] = (frame, answer)
        try:
            await self._send(frame)
            reply = await answer
        finally:
            del self._pending[number]
        if reply.error:
            raise RolloutError(f"the desk at {self.address} refused: {reply.error}")
        return reply

    async def _receive(self) -> None:
        while True:
            raw = await self._socket.recv()
            self._heard_at = now()
            reply = decode(raw, DeskReply, limit=MAX_MESSAGE_BYTES)
            if reply.number == 0:
                self._end = f"the trainer has closed the desk {self.address}"
                self._fail(PeerError(self._end))
                return
            waiting = self._pending.get(reply.number)
            if waiting is not None and not waiting[1].done():
                waiting[1].set_result(reply)

    async def _insist(self) -> None:
        """Send again what has no answer; notice a desk that is gone."""
        while True:
            await asyncio.sleep(_RESEND_SECONDS)
            if not self._pending:
                self._heard_at = now()
            elif now() - self._heard_at > self._lost_seconds:
                self._fail(
                    DeadlineExceeded(
                        f"the desk at {self.address} has been silent for {self._lost_seconds:g} s; "
                        "is the trainer gone, or the invitation another run's?"
                    )
                )
                self._heard_at = now()
            for frame, _ in tuple(self._pending.values()):
                await self._send(frame)

    async def _send(self, frame: bytes) -> None:
        """Hand a frame to libzmq, if it takes it.

        Once the desk has turned the connection down for good, libzmq takes no more frames, and a
        send that waits never returns. What was not taken goes out with `_insist`, which also
        notices that nobody answers.
        """
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send(frame, zmq.NOBLOCK)

    def _fail(self, error: Exception) -> None:
        for _, answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error)

    def _return(self, asking: "asyncio.Future[DeskReply]") -> None:
        """Give back what was assigned to nobody."""
        if asking.cancelled() or asking.exception() is not None:
            return
        assignment = asking.result().assignment
        if assignment is not None:
            back = asyncio.create_task(self._give_back(assignment.ticket))
            self._returning.add(back)
            back.add_done_callback(self._returning.discard)

    async def _give_back(self, ticket: Ticket) -> None:
        with contextlib.suppress(PeerError, DeadlineExceeded):
            await self.give_up(ticket, "nobody asks for it any more", 0)

    def _release(self) -> None:
        self._socket.close()
        self._context.term()
