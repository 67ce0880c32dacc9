"""How an engine gets newer weights in mid-run, and what becomes of the requests that it works on.

A `Refresher` brings one engine to at least a version; it is the trainer's side that knows how.
The moment at which the weights change lies inside its `boundary`: there the requests in flight are
kept, waited for, or aborted and sent again. Not here: when an engine is refreshed (`producer.py`,
`sequential.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from reshard.errors import EngineError, ReshardError
from reshard.ids import PolicyVersion
from reshard_trainer.engines import InFlight
from reshard_trainer.rollouts.clock import Until
from reshard_trainer.rollouts.endpoint import Endpoint
from reshard_trainer.rollouts.errors import EngineFault, EngineFenced, RolloutError
from reshard_trainer.rollouts.fleet import Fleet, Seat
from reshard_trainer.rollouts.meter import Meter
from reshard_trainer.rollouts.rollout import EngineName

Boundary = AbstractAsyncContextManager[None]
"""Entered right before an engine's weights change, left right after."""

_POLL_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Refreshed:
    """Where a refresh left an engine.

    Attributes:
        version: what it serves now, of this run.
        kv: whether KV blocks of older weights were dropped.
    """

    version: PolicyVersion
    kv: Literal["reset", "kept"] = "reset"


class Refresher(Protocol):
    """Brings engines to versions of this run."""

    @property
    def can(self) -> Collection[InFlight]:
        """What it lets become of running requests: all, if it enters `boundary`."""

    async def refresh(
        self, engine: EngineName, at_least: PolicyVersion, boundary: Boundary, until: Until
    ) -> Refreshed:
        """Bring an engine to a version; nothing to do if it is there.

        Newer than asked for is welcome: a version that is overtaken while it waits is skipped.

        Args:
            engine: which.
            at_least: the least version that will do.
            boundary: to be entered around the moment at which the weights change, if they do.
            until: deadline.

        Raises:
            ReshardError: it did not get there.
        """


class Renewal:
    """Refreshes the seats of a fleet, one by one, each on its own."""

    def __init__(
        self,
        fleet: Fleet,
        refresher: Refresher,
        *,
        in_flight: InFlight = "keep",
        seconds: float = 120.0,
        meter: Meter,
    ) -> None:
        """Prepare.

        Args:
            fleet: whose seats.
            refresher: how.
            in_flight: what becomes of running requests.
            seconds: longest that one refresh may take.
            meter: counts.

        Raises:
            RolloutError: the refresher cannot do that with running requests.
        """
        if in_flight not in refresher.can:
            raise RolloutError(
                f"in_flight={in_flight!r} cannot be had with {type(refresher).__name__}, which "
                f"can {', '.join(refresher.can)}"
            )
        self._fleet = fleet
        self._refresher = refresher
        self._in_flight = in_flight
        self._seconds = seconds
        self._meter = meter

    async def renew(self, seat: Seat, at_least: PolicyVersion, until: Until | None = None) -> bool:
        """Bring one engine to at least a version; whether it got there. Its failure is noted."""
        limit = until.sooner(self._seconds) if until else Until.after(self._seconds)
        before = seat.version
        try:
            async with limit.limit():
                done = await self._refresher.refresh(
                    seat.name, at_least, self._boundary(seat, limit), limit
                )
            if done.version < at_least:
                raise EngineFault(f"it was brought to version {done.version} only")
        except (ReshardError, TimeoutError) as error:
            reason = str(error) or f"it took more than {limit.seconds:g} s"
            self._fleet.not_refreshed(
                seat, at_least, reason, fenced=isinstance(error, EngineFenced)
            )
            self._meter.refreshed(seat.name, None)
            return False
        if done.kv == "kept" and done.version != before:
            seat.kept_kv.add(done.version)
        self._fleet.refreshed(seat, done.version)
        self._meter.refreshed(seat.name, done.version)
        return True

    @asynccontextmanager
    async def _boundary(self, seat: Seat, until: Until) -> AsyncIterator[None]:
        if self._in_flight == "keep":
            yield
            return
        with self._fleet.holding(seat):
            if self._in_flight == "abort" and seat.requests:
                await seat.endpoint.abort(sorted(seat.requests), until)
            await self._fleet.drained(seat, until)
            yield


class PublishReport(Protocol):
    """One engine's part of `reshard_trainer.RefitReport`."""

    @property
    def version(self) -> PolicyVersion | None:
        """What it serves, if that is known."""

    @property
    def error(self) -> str:
        """Empty, or why it did not get its version."""

    @property
    def state(self) -> Literal["serving", "held", "unknown"]:
        """`held`: it may hold weights of two versions, and is paused until a refit succeeds."""


class _RefitReport(Protocol):
    @property
    def engines(self) -> Mapping[str, PublishReport]: ...


class Publishes(Protocol):
    """What is needed of `reshard_trainer.Hook`."""

    @property
    def last_report(self) -> _RefitReport | None:
        """Of the last publish."""


class HookRefresher:
    """For a trainer whose hook brings all engines to each version that it publishes.

    Nothing is left to do but to look at the hook's report of this engine; not at the label that
    the engine bears, which may be another run's. What becomes of running requests is the engine's
    own doing when the hook pauses it: aborted ones are answered, and the client sends them again
    behind their tokens; held or new ones run on when it is resumed.

    Attributes:
        can: what the hook's engines do with running requests, that alone.
    """

    can: Collection[InFlight]

    def __init__(
        self,
        hook: Publishes,
        *,
        kv: Literal["reset", "kept"] = "reset",
        in_flight: InFlight = "keep",
    ) -> None:
        """Look at a hook.

        Args:
            hook: from `reshard_trainer.attach`.
            kv: `kept` if it was attached with `prefix_cache="keep"`.
            in_flight: as its engines were given: `HttpEngine(url, in_flight=...)`.
        """
        self.can = frozenset[InFlight]((in_flight,))
        self._hook = hook
        self._kv = kv

    async def refresh(
        self,
        engine: EngineName,
        at_least: PolicyVersion,
        boundary: Boundary,  # noqa: ARG002  # the weights have changed when the report is there
        until: Until,
    ) -> Refreshed:
        """Wait until the hook has brought the engine there."""
        while True:
            report = self._hook.last_report
            part = report.engines.get(engine) if report else None
            if part is not None and part.state == "held":
                raise EngineFenced(f"engine {engine} is held: {part.error}")
            if part is not None and part.version is not None and part.version >= at_least:
                return Refreshed(part.version, self._kv)
            if until.expired:
                raise EngineError(
                    f"engine {engine} did not get version {at_least} within {until.seconds:g} s: "
                    f"{_why(report, part)}"
                )
            await asyncio.sleep(min(_POLL_SECONDS, until.remaining()))


class WatchRefresher:
    """For engines that somebody else publishes to: waits until an engine says that it is there.

    It believes the engine's label, so the engine must not come from another run with labels of its
    own. For producers on other machines; the trainer's own use `HookRefresher`.

    Attributes:
        can: `keep` alone.
    """

    can: Collection[InFlight] = frozenset[InFlight](("keep",))

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        """Watch these engines."""
        self._endpoints = {endpoint.name: endpoint for endpoint in endpoints}

    async def refresh(
        self,
        engine: EngineName,
        at_least: PolicyVersion,
        boundary: Boundary,  # noqa: ARG002  # the weights change when somebody else says so
        until: Until,
    ) -> Refreshed:
        """Wait until the engine says that it is there."""
        while True:
            version = await self._endpoints[engine].version(until)
            if version is not None and version >= at_least:
                return Refreshed(version)
            if until.expired:
                raise EngineError(
                    f"engine {engine} was not brought to version {at_least} within "
                    f"{until.seconds:g} s; it serves {'none' if version is None else version}"
                )
            await asyncio.sleep(min(_POLL_SECONDS, until.remaining()))


def _why(report: _RefitReport | None, part: PublishReport | None) -> str:
    if report is None:
        return "nothing was published yet; call hook.publish() for the first weights"
    if part is None:
        return f"the hook knows only {', '.join(report.engines) or 'no engine'}"
    return part.error or f"the hook brought it to version {part.version}"
