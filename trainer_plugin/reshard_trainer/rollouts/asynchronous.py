"""Asynchronous push-pull: engines generate all the time, the trainer takes batches when it wants.

Brings desk, fleet and producers together on one event loop. A training script uses it from its own
thread through `background.py`.
"""

import asyncio
import logging

from reshard.errors import EngineError, ReshardError
from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.buffer import Batch
from reshard_trainer.rollouts.clock import Until
from reshard_trainer.rollouts.desk import DeskSettings, RolloutDesk, SavedDesk
from reshard_trainer.rollouts.desk_service import Desk, DeskService
from reshard_trainer.rollouts.endpoint import Endpoint
from reshard_trainer.rollouts.fleet import Fleet
from reshard_trainer.rollouts.generating import Generating
from reshard_trainer.rollouts.meter import Meter
from reshard_trainer.rollouts.producer import Producer
from reshard_trainer.rollouts.prompts import PromptSource
from reshard_trainer.rollouts.refresh import Refresher, Renewal
from reshard_trainer.rollouts.rollout import EngineName
from reshard_trainer.rollouts.workshop import Workshop

logger = logging.getLogger(__name__)


class Crew:
    """The producers of one process; engines join and leave at any time.

    Attributes:
        fleet: the engines.
    """

    def __init__(self, desk: Desk, refresher: Refresher, how: Generating, meter: Meter) -> None:
        """Start without engines.

        Args:
            desk: in this process, or `RemoteDesk`.
            refresher: brings engines to newer versions.
            how: groups are made.
            meter: counts.
        """
        self.fleet = Fleet(how.chance)
        self._check_seconds = how.check_seconds
        self._tasks: dict[EngineName, tuple[Producer, asyncio.Task[None]]] = {}
        self._shop = Workshop(
            desk=desk,
            client=how.client(self.fleet),
            renewal=Renewal(
                self.fleet,
                refresher,
                in_flight=how.in_flight,
                seconds=how.refresh_seconds,
                meter=meter,
            ),
            reward=how.reward,
            samples=how.samples,
            group_seconds=how.group_seconds,
            meter=meter,
        )

    async def join(self, endpoint: Endpoint) -> None:
        """An engine joins; it serves once it has been refreshed.

        Raises:
            EngineError: it cannot serve rollouts; says what to change.
        """
        await endpoint.check(Until.after(self._check_seconds))
        seat = self.fleet.join(endpoint)
        producer = Producer(self._shop, seat)
        task = asyncio.create_task(producer.run(), name=f"producer of {seat.name}")
        self._tasks[seat.name] = producer, task
        logger.info("engine %s joins", seat.name)

    async def leave(self, name: EngineName, seconds: float = 0.0) -> None:
        """An engine leaves; what it has in hand after `seconds` is asked again elsewhere.

        Raises:
            RolloutError: there is none of this name.
        """
        seat = self.fleet.leave(name)
        producer, task = self._tasks.pop(name)
        await producer.finished(Until.after(seconds))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await seat.endpoint.close()
        logger.info("engine %s has left", name)

    def raise_failure(self) -> None:
        """Raise the error with which a producer ended by itself.

        Raises:
            ReshardError: that error.
        """
        for name, (_, task) in self._tasks.items():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise ReshardError(f"the producer of engine {name} ended: {error}") from error

    async def close(self) -> None:
        """All engines leave."""
        for name in tuple(self._tasks):
            await self.leave(name)


class AsynchronousRollouts:
    """See the module. All calls are made on the event loop on which it was made.

    Attributes:
        service: the desk; producers elsewhere reach it through `desk_server.py`.
        crew: the producers of this process.
        meter: counts.
    """

    def __init__(
        self,
        prompts: PromptSource,
        refresher: Refresher,
        how: Generating,
        settings: DeskSettings,
        *,
        saved: SavedDesk | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Start without engines; see `join`.

        Args:
            prompts: the run's stream.
            refresher: brings engines to newer versions.
            how: groups are made.
            settings: batch, staleness, cadence of publishing.
            saved: from `save`, to go on with a run.
            meter: counts; None: a new one.
        """
        self.meter = meter or Meter()
        self.service = DeskService(RolloutDesk(settings, prompts, saved), self.meter)
        self.crew = Crew(self.service, refresher, how, self.meter)

    async def join(self, *endpoints: Endpoint) -> None:
        """Engines join; those that can do so although others cannot.

        Raises:
            EngineError: which cannot serve rollouts, and why.
        """
        outcomes = await asyncio.gather(
            *(self.crew.join(endpoint) for endpoint in endpoints), return_exceptions=True
        )
        faults = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        strange = [fault for fault in faults if not isinstance(fault, ReshardError)]
        if strange:
            raise strange[0]
        if faults:
            raise EngineError("these engines could not join", map(str, faults))

    async def leave(self, name: EngineName, seconds: float = 0.0) -> None:
        """An engine leaves; what it has in hand after `seconds` is asked again elsewhere."""
        await self.crew.leave(name, seconds)

    async def take(self, version: PolicyVersion, seconds: float) -> Batch:
        """The batch of the trainer's step at `version`, once it is complete.

        Raises:
            DeadlineExceeded: it is not complete in time; says what is missing.
            PromptsExhausted: no full batch will ever come.
            RolloutError: not the version whose batch is next.
        """
        self.crew.raise_failure()
        return await self.service.take(version, seconds)

    def publish(self, version: PolicyVersion) -> None:
        """Engines may have this version from now on; the refresher can bring them there."""
        self.service.publish(version)

    def save(self, version: PolicyVersion) -> SavedDesk:
        """The state that belongs into the trainer's checkpoint of `version`.

        Raises:
            RolloutError: the trainer cannot be at this version.
        """
        return self.service.save(version)

    async def close(self) -> None:
        """All engines of this process leave."""
        await self.crew.close()
