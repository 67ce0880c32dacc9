"""Sequential pull: the engine refreshes its weights before it samples; staleness is 0.

A call is answered by one version, however many engines share it. Engines that are refreshed early
begin early; who comes later at the same version takes over a part. Not here: how an engine gets
weights (`refresh.py`).
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final, Literal

from reshard.errors import EngineError
from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.client import Route, first_error
from reshard_trainer.rollouts.clock import Until, now
from reshard_trainer.rollouts.endpoint import Endpoint
from reshard_trainer.rollouts.errors import EngineFault
from reshard_trainer.rollouts.fleet import Fleet, Seat
from reshard_trainer.rollouts.generating import Generating
from reshard_trainer.rollouts.idleness import measure_idleness
from reshard_trainer.rollouts.meter import Meter
from reshard_trainer.rollouts.prompts import PromptSource
from reshard_trainer.rollouts.refresh import Refresher, Renewal
from reshard_trainer.rollouts.rollout import (
    EngineName,
    Prompt,
    Rollout,
    RolloutGroup,
    SampleId,
    Serial,
)
from reshard_trainer.rollouts.staleness import StalenessBound
from reshard_trainer.rollouts.workshop import score_all

logger = logging.getLogger(__name__)

Refresh = Literal["always", "request", "off"]
"""When a call refreshes an engine.

`always`: before every call, whatever it serves. `request`: if it serves less than the call wants.
`off`: never; somebody else publishes, and the call waits for that.
"""

_LOOK_SECONDS: Final = 0.2


class _Moved(Exception):
    """The version of a call is served by no engine any more, a newer one is."""


class SequentialRollouts:
    """See the module. All calls are made on the event loop on which it was made.

    Attributes:
        fleet: the engines.
        meter: counts.
    """

    def __init__(
        self,
        refresher: Refresher,
        how: Generating,
        *,
        refresh: Refresh = "request",
        meter: Meter | None = None,
    ) -> None:
        """Start without engines; see `join`.

        Args:
            refresher: brings engines to newer versions.
            how: groups are made.
            refresh: when a call refreshes an engine.
            meter: counts; None: a new one.
        """
        self.meter = meter or Meter()
        self.fleet = Fleet(how.chance)
        self._how = how
        self._idleness: dict[EngineName, asyncio.Task[None]] = {}
        self._refresh = refresh
        self._client = how.client(self.fleet)
        self._renewal = Renewal(
            self.fleet,
            refresher,
            in_flight="keep",
            seconds=how.refresh_seconds,
            meter=self.meter,
        )

    async def join(self, *endpoints: Endpoint) -> None:
        """Engines join.

        Raises:
            EngineError: one cannot serve rollouts; says what to change.
        """
        for endpoint in endpoints:
            await endpoint.check(Until.after(self._how.check_seconds))
            seat = self.fleet.join(endpoint)
            self._idleness[seat.name] = asyncio.create_task(
                measure_idleness(self.fleet, seat, self.meter)
            )

    async def leave(self, name: EngineName) -> None:
        """An engine leaves; requests that it works on are sent elsewhere."""
        seat = self.fleet.leave(name)
        idleness = self._idleness.pop(name)
        idleness.cancel()
        await asyncio.gather(idleness, return_exceptions=True)
        await seat.endpoint.close()

    async def generate(
        self,
        prompts: Mapping[Serial, Prompt],
        *,
        min_version: PolicyVersion,
        seconds: float,
        refresh: Refresh | None = None,
    ) -> tuple[RolloutGroup, ...]:
        """The groups of these prompts, all of one version, which is at least `min_version`.

        Args:
            prompts: by serial.
            min_version: the least version that will do.
            seconds: until the deadline.
            refresh: None: as this object was made.

        Returns:
            In the order of the prompts.

        Raises:
            StaleEngine: no engine served `min_version`, or not all samples came from one version,
                by the deadline.
            RequestRefused: a request itself is bad.
            EngineFault: too many engines failed on a sample.
        """
        if not prompts:
            return ()
        until = Until.after(seconds)
        how = refresh or self._refresh
        keepers = [
            asyncio.create_task(self._keep(seat, min_version, how, until))
            for seat in self.fleet.seats
        ]
        start = now()
        try:
            return await self._at_one_version(prompts, min_version, until)
        finally:
            self.meter.idle("trainer", "trainer", now() - start)
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def close(self) -> None:
        """All engines leave."""
        for seat in self.fleet.seats:
            await self.leave(seat.name)

    async def _at_one_version(
        self, prompts: Mapping[Serial, Prompt], least: PolicyVersion, until: Until
    ) -> tuple[RolloutGroup, ...]:
        while True:
            version = await self._newest_served(least, until)
            try:
                return await self._groups(prompts, version, until)
            except _Moved:
                logger.info("no engine serves version %d any more; starting over", version)

    async def _newest_served(self, least: PolicyVersion, until: Until) -> PolicyVersion:
        """The newest version, at least `least`, that some engine serves, once one does."""
        await self.fleet.free_seat(
            lambda version: version >= least, until, what=f"version {least} or newer"
        )
        return max(
            seat.version
            for seat in self.fleet.seats
            if seat.version is not None and seat.usable(now())
        )

    async def _groups(
        self, prompts: Mapping[Serial, Prompt], version: PolicyVersion, until: Until
    ) -> tuple[RolloutGroup, ...]:
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch(version))
                groups = [
                    tasks.create_task(self._group(serial, prompt, version, until))
                    for serial, prompt in prompts.items()
                ]
                await asyncio.wait(groups)
                watch.cancel()
        except ExceptionGroup as failures:
            if failures.subgroup(_Moved) is not None:
                raise _Moved from failures
            raise first_error(failures) from failures
        return tuple(task.result() for task in groups)

    async def _watch(self, version: PolicyVersion) -> None:
        """End the attempt if only newer versions are served."""
        while True:
            served = {seat.version for seat in self.fleet.seats if seat.version is not None}
            if served and min(served) > version:
                raise _Moved
            await self.fleet.changed.next(Until.after(_LOOK_SECONDS))

    async def _group(
        self, serial: Serial, prompt: Prompt, version: PolicyVersion, until: Until
    ) -> RolloutGroup:
        ids = [SampleId(serial, sample) for sample in range(self._how.samples)]
        async with asyncio.TaskGroup() as tasks:
            samples = [
                tasks.create_task(self._sample(each, prompt, version, until)) for each in ids
            ]
        rollouts = tuple(task.result() for task in samples)
        scored = await score_all(self._how.reward, prompt, rollouts)
        return RolloutGroup(serial, 0, scored)

    async def _sample(
        self, sample: SampleId, prompt: Prompt, version: PolicyVersion, until: Until
    ) -> Rollout:
        """A sample of exactly this version; one whose engine changed meanwhile is made anew."""
        route = Route(at_least=version, at_most=version, on_abort="start_over")
        while True:
            rollout = await self._client.sample(sample, prompt, route, until)
            if rollout.oldest == rollout.newest == version:
                self.meter.sampled(rollout.engines[-1], len(rollout.tokens))
                return rollout
            self._note_change(rollout)

    def _note_change(self, rollout: Rollout) -> None:
        """The labels tell what its engine really serves."""
        for seat in self.fleet.seats:
            if seat.name == rollout.engines[-1]:
                logger.info("engine %s serves version %d by now", seat.name, rollout.newest)
                self.fleet.refreshed(seat, rollout.newest)

    async def _keep(self, seat: Seat, least: PolicyVersion, refresh: Refresh, until: Until) -> None:
        """Bring one engine to the call's version, and back to it after it has failed."""
        if refresh == "always":
            self.fleet.doubt(seat)
        while not until.expired:
            if seat.version is not None and seat.version >= least and not seat.fenced:
                await self.fleet.changed.next(until)
                continue
            await asyncio.sleep(max(0.0, seat.rest_until - now()))
            if refresh == "off":
                await self._look(seat, until)
                await asyncio.sleep(_LOOK_SECONDS)
            elif not await self._renewal.renew(seat, least, until):
                await asyncio.sleep(self.fleet.rest_seconds(seat.refresh_failures))

    async def _look(self, seat: Seat, until: Until) -> None:
        """Ask an engine what it serves."""
        try:
            version = await seat.endpoint.version(until.sooner(self._how.check_seconds))
        except EngineError as error:
            self.fleet.failed(seat, EngineFault(str(error)))
        else:
            if version is not None and version != seat.version:
                self.fleet.refreshed(seat, version)


def batch_of(
    prompts: PromptSource, bound: StalenessBound, version: PolicyVersion
) -> dict[Serial, Prompt]:
    """The prompts of the step that a trainer at `version` makes, in the run's order."""
    first = bound.consumed(version)
    found = {Serial(n): prompts.prompt(Serial(n)) for n in range(first, first + bound.batch)}
    return {serial: prompt for serial, prompt in found.items() if prompt is not None}
