"""Samples from a fleet of engines: routed by load and version, tried elsewhere where one fails.

A sample is asked of one engine at a time, and its answer is used once: whoever gives it, it is the
sample with that identity. Not here: how many samples may run (`desk.py`).
"""

import asyncio
import itertools
import logging
import random
from dataclasses import dataclass
from typing import Final, Literal

from reshard.errors import EngineError
from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.clock import Until
from reshard_trainer.rollouts.errors import EngineFault
from reshard_trainer.rollouts.fleet import Fleet, Seat
from reshard_trainer.rollouts.progress import Progress
from reshard_trainer.rollouts.rollout import Prompt, Rollout, SampleId
from reshard_trainer.rollouts.sampling import Generation, Sampling

logger = logging.getLogger(__name__)

_AFTER_ABORT_SECONDS: Final = 0.05

OnAbort = Literal["continue", "start_over"]
"""What follows when an engine ends a request early: go on from its tokens, or anew."""


@dataclass(frozen=True, slots=True)
class Route:
    """Which engines may make a sample.

    Attributes:
        at_least: their least version.
        at_most: their greatest version; None: any.
        home: the engine that is taken whenever it will do.
        on_abort: what follows when an engine ends a request early.
    """

    at_least: PolicyVersion
    at_most: PolicyVersion | None = None
    home: Seat | None = None
    on_abort: OnAbort = "continue"

    def __str__(self) -> str:
        """For messages."""
        if self.at_most == self.at_least:
            return f"version {self.at_least}"
        return f"version {self.at_least} or newer"


class RolloutClient:
    """Makes samples.

    Attributes:
        fleet: the engines.
    """

    def __init__(
        self,
        fleet: Fleet,
        sampling: Sampling,
        *,
        attempts: int = 4,
        request_seconds: float = 600.0,
        chance: random.Random | None = None,
    ) -> None:
        """Take a fleet.

        Args:
            fleet: the engines, which may change.
            sampling: of all samples.
            attempts: engines' failures that one sample survives, less one.
            request_seconds: longest that one engine may take for one request.
            chance: spreads requests that are sent again, and makes their names unique.
        """
        self.fleet = fleet
        self.sampling = sampling
        self._attempts = attempts
        self._request_seconds = request_seconds
        self._chance = chance or random.Random()
        self._name = f"rollout-{self._chance.getrandbits(48):012x}"
        self._numbers = itertools.count()

    async def sample(self, sample: SampleId, prompt: Prompt, route: Route, until: Until) -> Rollout:
        """One sample, from whichever engine.

        Raises:
            StaleEngine: no engine at a wanted version had room by the deadline.
            EngineFault: too many engines failed on it.
            RequestRefused: the request itself is bad.
        """
        progress = Progress(sample, prompt, self.sampling)
        faults: list[str] = []
        while not progress.finished:
            seat = await self._seat(progress, route, until)
            try:
                answer = await self._ask(seat, progress, until)
            except EngineFault as error:
                faults.append(str(error))
                self.fleet.failed(seat, error)
                if len(faults) >= self._attempts:
                    who = f"sample {sample.sample} of prompt {sample.serial}"
                    raise EngineFault(f"{who} failed {len(faults)} times", faults) from error
                progress = progress.mark("retried")
                continue
            progress = progress.add(answer, seat.name, seat.kept_kv)
            if not progress.finished:
                progress = await self._after_abort(progress, route)
        return progress.rollout()

    async def _seat(self, progress: Progress, route: Route, until: Until) -> Seat:
        """An engine that may go on: the versions of a rollout's tokens never decrease."""
        least = max(route.at_least, progress.newest or route.at_least)

        def wanted(version: PolicyVersion) -> bool:
            return least <= version and (route.at_most is None or version <= route.at_most)

        return await self.fleet.free_seat(wanted, until, home=route.home, what=str(route))

    async def _ask(self, seat: Seat, progress: Progress, until: Until) -> Generation:
        # Unique in the engine, also beside requests of a client that was lost.
        name = f"{self._name}-{next(self._numbers)}-{progress.id.serial}-{progress.id.sample}"
        with self.fleet.using(seat, name):
            limit = until.sooner(self._request_seconds)
            answer = await seat.endpoint.generate(progress.request(name), limit)
        self.fleet.succeeded(seat)
        return answer

    async def _after_abort(self, progress: Progress, route: Route) -> Progress:
        await asyncio.sleep(_AFTER_ABORT_SECONDS * self._chance.uniform(0.5, 1.0))
        return progress if route.on_abort == "continue" else progress.start_over()


async def all_samples(
    client: RolloutClient, ids: list[SampleId], prompt: Prompt, route: Route, until: Until
) -> tuple[Rollout, ...]:
    """Several samples of one prompt at once; the first failure ends the others.

    Raises:
        EngineError: see `RolloutClient.sample`.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(client.sample(sample, prompt, route, until)) for sample in ids
            ]
    except ExceptionGroup as failures:
        raise first_error(failures) from failures
    return tuple(task.result() for task in tasks)


def first_error(failures: ExceptionGroup[Exception]) -> Exception:
    """The first error of a group of tasks, one of an engine rather than another."""
    known = failures.subgroup(EngineError)
    first: Exception = (known or failures).exceptions[0]
    return first_error(first) if isinstance(first, ExceptionGroup) else first
