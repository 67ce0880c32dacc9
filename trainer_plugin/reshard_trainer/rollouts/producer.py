"""One engine in asynchronous mode: it generates whenever the gate lets it, and renews its weights.

Its loops share nothing but the engine's version and the newest published one. None waits for
another engine, and the trainer waits for none. Runs beside the desk, or on another machine
(`desk_client.py`).
"""

import asyncio
import contextlib
import logging
from typing import Final

from reshard.errors import ReshardError
from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.buffer import Verdict
from reshard_trainer.rollouts.clock import Until, now
from reshard_trainer.rollouts.desk import Assignment
from reshard_trainer.rollouts.errors import RolloutError
from reshard_trainer.rollouts.fleet import SHORTEST_REST_SECONDS, Seat
from reshard_trainer.rollouts.gate import Ticket
from reshard_trainer.rollouts.idleness import measure_idleness
from reshard_trainer.rollouts.pace import Pace
from reshard_trainer.rollouts.workshop import Workshop

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS: Final = 2.0
"""How long one question to the desk stays open before it is asked anew."""


class Producer:
    """Works for one engine until it is cancelled."""

    def __init__(self, shop: Workshop, seat: Seat) -> None:
        self._shop = shop
        self._seat = seat
        self._fleet = shop.client.fleet
        self._published: PolicyVersion | None = None
        self._groups: dict[Ticket, asyncio.Task[None]] = {}
        self._broken_off: set[asyncio.Task[None]] = set()
        self._delivering: set[Ticket] = set()
        self._begun: dict[Ticket, float] = {}
        self._pace = Pace(seat.endpoint.slots)

    async def run(self) -> None:
        """Work; ends by cancellation, or with the desk's error. What was begun is given up."""
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._follow_news())
                loops.create_task(self._stay_current())
                loops.create_task(self._admit())
                loops.create_task(measure_idleness(self._fleet, self._seat, self._shop.meter))
        finally:
            await self._give_up_all("its engine has left")

    async def finished(self, until: Until) -> None:
        """Return when no group is in hand, or at the deadline."""
        while self._groups and not until.expired:
            await self._fleet.changed.next(until.sooner(_PATIENCE_SECONDS))

    async def _follow_news(self) -> None:
        """Learn what is published; break off what was overtaken."""
        while True:
            tickets = frozenset(self._groups.keys() - self._delivering)
            standing = await self._shop.desk.news(self._published, tickets, _PATIENCE_SECONDS)
            for ticket in standing.ended:
                self._break_off(ticket)
            if standing.published != self._published:
                self._published = standing.published
                self._fleet.changed.beat()

    async def _stay_current(self) -> None:
        """Renew the weights whenever newer ones are published.

        One renewal at a time: what is published meanwhile is taken in the next one, and versions
        in between are skipped.
        """
        seat = self._seat
        while True:
            target = self._published
            if target is None or not self._behind(target):
                await self._fleet.changed.next(Until.after(_PATIENCE_SECONDS))
                continue
            if seat.refresh_failures:
                await asyncio.sleep(self._fleet.rest_seconds(seat.refresh_failures))
            await asyncio.sleep(max(0.0, seat.rest_until - now()))
            await self._shop.renewal.renew(seat, self._next())

    def _next(self) -> PolicyVersion:
        """The least version that brings the engine on: a slow one may skip what is newest now."""
        known = self._seat.version
        return PolicyVersion(0) if known is None else PolicyVersion(known + 1)

    def _behind(self, target: PolicyVersion) -> bool:
        seat = self._seat
        return seat.version is None or bool(seat.fenced) or seat.version < target

    async def _admit(self) -> None:
        """Start a group whenever the gate admits one and the engine has a slot."""
        while True:
            if not self._has_room():
                await self._fleet.changed.next(Until.after(self._until_usable()))
                continue
            assignment = await self._assignment()
            if assignment is not None:
                self._start(assignment)

    def _has_room(self) -> bool:
        seat = self._seat
        free = seat.in_flight < seat.endpoint.slots
        return free and seat.usable(now()) and self._pace.room(len(self._groups), now())

    def _until_usable(self) -> float:
        """How long nothing changes that nobody announces: rests end."""
        rests = (self._seat.rest_until - now(), self._pace.rest(now()))
        rest = min((rest for rest in rests if rest > 0), default=_PATIENCE_SECONDS)
        return max(rest, SHORTEST_REST_SECONDS)

    async def _assignment(self) -> Assignment | None:
        """What the desk assigns at the engine's version; None: not now, or the version changed."""
        seat = self._seat
        version = seat.version
        assert version is not None
        asking = asyncio.create_task(self._shop.desk.assign(seat.name, version, _PATIENCE_SECONDS))
        try:
            while not asking.done() and seat.version == version and seat.usable(now()):
                change = self._fleet.changed.next(Until.after(_PATIENCE_SECONDS))
                await wait_any(asking, asyncio.create_task(change))
            asking.cancel()
            await asyncio.wait({asking})
        except asyncio.CancelledError:
            asking.cancel()
            self._orphan(asking)
            raise
        return self._assigned(asking)

    def _assigned(self, asking: "asyncio.Task[Assignment | None]") -> Assignment | None:
        if asking.cancelled():
            return None
        try:
            return asking.result()
        except RolloutError as error:
            logger.warning("%s", error)
            self._fleet.doubt(self._seat)
            return None

    def _orphan(self, asking: "asyncio.Task[Assignment | None]") -> None:
        """What was assigned while this producer was cancelled is given up with the rest."""
        if asking.done() and not asking.cancelled() and asking.exception() is None:
            assignment = asking.result()
            if assignment is not None:
                self._start(assignment)

    def _start(self, assignment: Assignment) -> None:
        ticket = assignment.ticket
        task = asyncio.create_task(self._work(assignment))
        self._groups[ticket] = task
        self._begun[ticket] = now()
        task.add_done_callback(lambda _: self._ended(ticket, task))

    async def _work(self, assignment: Assignment) -> None:
        group = await self._shop.make(assignment, self._seat)
        if group is None:
            return
        # From here on the end of its admission is no news.
        self._delivering.add(assignment.ticket)
        verdict = await self._shop.desk.deliver(group)
        if verdict is Verdict.ACCEPTED:
            self._pace.arrived()
        elif verdict is Verdict.EVICTED:
            self._overtaken(assignment.ticket)
        elif verdict is Verdict.REJECTED:
            # Its label is no version of this run: find out what the engine serves.
            self._fleet.doubt(self._seat)

    def _overtaken(self, ticket: Ticket) -> None:
        self._pace.overtaken(now() - self._begun[ticket], now())

    def _ended(self, ticket: Ticket, task: "asyncio.Task[None]") -> None:
        self._groups.pop(ticket, None)
        self._begun.pop(ticket, None)
        self._delivering.discard(ticket)
        self._broken_off.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("prompt %d: %s", ticket.serial, error, exc_info=error)
        self._fleet.changed.beat()

    def _break_off(self, ticket: Ticket) -> None:
        """End a group that the desk does not wait for any more."""
        if ticket in self._delivering:
            return
        task = self._groups.pop(ticket, None)
        if task is not None:
            self._overtaken(ticket)
            self._broken_off.add(task)
            task.cancel()

    async def _give_up_all(self, reason: str) -> None:
        tasks = dict(self._groups)
        for task in (*tasks.values(), *self._broken_off):
            task.cancel()
        await asyncio.gather(*tasks.values(), *self._broken_off, return_exceptions=True)
        for ticket, task in tasks.items():
            if task.cancelled():
                with contextlib.suppress(ReshardError):
                    await self._shop.desk.give_up(ticket, reason, 0)


async def wait_any(first: "asyncio.Task[object]", second: "asyncio.Task[object]") -> None:
    """Return when one of two tasks is done; the second is cancelled."""
    try:
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        second.cancel()
