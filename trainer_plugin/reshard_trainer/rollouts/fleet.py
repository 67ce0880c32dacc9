"""The engines that take part, as the trainer's side sees them: who serves what, who is free.

Engines join and leave at any time. One that fails rests for a while that grows with each failure;
one that may have been restarted counts as of unknown version until it is refreshed. Not here: what
is sent to them (`client.py`), when they get weights (`refresh.py`).
"""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from reshard.errors import EngineError
from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.clock import Pulse, Until, now
from reshard_trainer.rollouts.endpoint import Endpoint
from reshard_trainer.rollouts.errors import EngineFault, EngineFenced, RolloutError, StaleEngine
from reshard_trainer.rollouts.rollout import EngineName

logger = logging.getLogger(__name__)

SHORTEST_REST_SECONDS: Final = 0.001
"""Less than this is not waited for: the clock might not have moved after it."""

FIRST_REST_SECONDS: Final = 0.5
LONGEST_REST_SECONDS: Final = 30.0

Wanted = Callable[[PolicyVersion], bool]
"""Which versions will do."""


@dataclass(slots=True, eq=False)
class Seat:
    """One engine's place in the fleet.

    Attributes:
        endpoint: how it is reached.
        version: what it serves; None: unknown, or no version of this run.
        requests: names of those that it works on.
        held: whether new requests wait, because its weights are about to change.
        fenced: why it refuses to serve, or empty.
        rest_until: before then it is left alone, on the loop's clock.
        failures: of requests, in a row.
        refresh_failures: in a row.
        trouble: the last failure, in words.
        left: whether it has left the fleet.
        kept_kv: versions that it took while it kept KV blocks of older weights.
    """

    endpoint: Endpoint
    version: PolicyVersion | None = None
    requests: set[str] = field(default_factory=set)
    held: bool = False
    fenced: str = ""
    rest_until: float = 0.0
    failures: int = 0
    refresh_failures: int = 0
    trouble: str = ""
    left: bool = False
    kept_kv: set[PolicyVersion] = field(default_factory=set)

    @property
    def name(self) -> EngineName:
        """The engine's."""
        return self.endpoint.name

    @property
    def in_flight(self) -> int:
        """Number of requests that it works on."""
        return len(self.requests)

    def usable(self, at: float) -> bool:
        """Whether requests may be sent to it, at this time of the loop's clock."""
        return (
            not (self.left or self.held or self.fenced)
            and self.version is not None
            and at >= self.rest_until
        )

    def serves(self, wanted: Wanted, at: float) -> bool:
        """Whether it is usable at a version that will do."""
        return self.version is not None and wanted(self.version) and self.usable(at)

    def __str__(self) -> str:
        """For messages."""
        if self.left:
            state = "has left"
        elif self.fenced:
            state = f"is fenced: {self.fenced}"
        elif self.refresh_failures:
            state = f"could not be refreshed {self.refresh_failures} times in a row: {self.trouble}"
        elif self.failures:
            state = f"failed {self.failures} times in a row: {self.trouble}"
        else:
            state = f"has {self.in_flight} requests in flight"
        label = "an unknown version" if self.version is None else f"version {self.version}"
        return f"{self.name} serves {label} and {state}"


class Fleet:
    """All engines.

    Attributes:
        changed: beats when any seat changes.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        """Make an empty fleet; `chance` spreads the rests of engines that fail together."""
        self.changed = Pulse()
        self._chance = chance or random.Random()
        self._seats: dict[EngineName, Seat] = {}

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Engines that are in the fleet."""
        return tuple(self._seats.values())

    def join(self, endpoint: Endpoint) -> Seat:
        """An engine joins; of unknown version until it is refreshed.

        Raises:
            RolloutError: one of this name is there.
        """
        if endpoint.name in self._seats:
            raise RolloutError(f"engine {endpoint.name} is in the fleet already")
        seat = Seat(endpoint)
        self._seats[endpoint.name] = seat
        self.changed.beat()
        return seat

    def leave(self, name: EngineName) -> Seat:
        """An engine leaves; what it works on is not interrupted.

        Raises:
            RolloutError: there is none of this name.
        """
        seat = self._seats.pop(name, None)
        if seat is None:
            raise RolloutError(
                f"engine {name} is not in the fleet; there are {', '.join(self._seats) or 'none'}"
            )
        seat.left = True
        self.changed.beat()
        return seat

    def refreshed(self, seat: Seat, version: PolicyVersion) -> None:
        """It serves this version now."""
        seat.version = version
        seat.refresh_failures, seat.fenced = 0, ""
        self.changed.beat()

    def succeeded(self, seat: Seat) -> None:
        """It answered a request."""
        seat.failures, seat.rest_until = 0, 0.0

    def doubt(self, seat: Seat) -> None:
        """Nobody knows what it serves; it is refreshed before it is used again."""
        seat.version = None
        self.changed.beat()

    def failed(self, seat: Seat, error: EngineError) -> None:
        """It failed a request: it rests, and nobody knows what it serves (it may be restarted)."""
        seat.version, seat.trouble = None, str(error)
        if isinstance(error, EngineFenced):
            seat.fenced = str(error)
        if seat.rest_until > now():
            return  # one outage, noticed by many requests
        seat.failures += 1
        rest = self.rest_seconds(seat.failures)
        seat.rest_until = now() + rest
        logger.warning("engine %s rests for %.1f s: %s", seat.name, rest, error)
        self.changed.beat()

    def not_refreshed(
        self, seat: Seat, version: PolicyVersion, reason: str, *, fenced: bool
    ) -> None:
        """It did not get a version. If it is not fenced, it serves on what it has."""
        seat.refresh_failures += 1
        seat.trouble = reason
        seat.fenced = reason if fenced else ""
        logger.warning(
            "engine %s did not get version %d or newer (%d times in a row): %s",
            seat.name, version, seat.refresh_failures, reason,
        )  # fmt: skip
        self.changed.beat()

    def rest_seconds(self, failures: int) -> float:
        """How long to leave an engine alone after so many failures in a row."""
        longest = min(LONGEST_REST_SECONDS, FIRST_REST_SECONDS * 2.0 ** (failures - 1))
        return longest * self._chance.uniform(0.5, 1.0)

    @contextmanager
    def holding(self, seat: Seat) -> Iterator[None]:
        """No new request is sent to it inside."""
        seat.held = True
        try:
            yield
        finally:
            seat.held = False
            self.changed.beat()

    @contextmanager
    def using(self, seat: Seat, request: str) -> Iterator[None]:
        """The request of this name is in flight inside."""
        seat.requests.add(request)
        try:
            yield
        finally:
            seat.requests.remove(request)
            self.changed.beat()

    async def drained(self, seat: Seat, until: Until) -> None:
        """Return when it works on nothing.

        Raises:
            EngineFault: it still does at the deadline.
        """
        while seat.in_flight:
            if until.expired:
                raise EngineFault(
                    f"engine {seat.name} still works on {seat.in_flight} requests after "
                    f"{until.seconds:g} s"
                )
            await self.changed.next(until)

    async def free_seat(
        self, wanted: Wanted, until: Until, *, home: Seat | None = None, what: str = ""
    ) -> Seat:
        """The least loaded engine that serves a wanted version, once one has room.

        Args:
            wanted: which versions will do.
            until: deadline.
            home: taken whenever it will do, even if others are freer.
            what: which versions those are, for the message.

        Raises:
            StaleEngine: none serves a wanted version by the deadline.
        """
        while True:
            seat = self._best(wanted, home)
            if seat is not None:
                return seat
            if until.expired:
                raise StaleEngine(
                    f"no engine could take a request at {what or 'a version that will do'} within "
                    f"{until.seconds:g} s",
                    map(str, self.seats),
                )
            # A rest that ends is no change that anybody announces.
            await self.changed.next(until.sooner(self._next_rest_end()))

    def _best(self, wanted: Wanted, home: Seat | None) -> Seat | None:
        at = now()
        if home is not None and home.serves(wanted, at):
            return home
        free = [
            seat
            for seat in self._seats.values()
            if seat.serves(wanted, at) and seat.in_flight < seat.endpoint.slots
        ]
        return min(free, key=lambda s: (s.in_flight / s.endpoint.slots, s.name), default=None)

    def _next_rest_end(self) -> float:
        at = now()
        ends = [seat.rest_until - at for seat in self._seats.values() if seat.rest_until > at]
        return max(SHORTEST_REST_SECONDS, min(ends, default=LONGEST_REST_SECONDS))
