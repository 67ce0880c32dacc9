"""The desk with waiting: producers wait for prompts and news, the trainer waits for batches.

Everything runs on one event loop. Not here: the rules (`desk.py`), other machines
(`desk_server.py`).
"""

from typing import Protocol

import msgspec

from reshard.errors import DeadlineExceeded
from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.buffer import Batch, Verdict
from reshard_trainer.rollouts.clock import Pulse, Until, now
from reshard_trainer.rollouts.counters import Counters
from reshard_trainer.rollouts.desk import Assignment, RolloutDesk, SavedDesk
from reshard_trainer.rollouts.gate import Ticket
from reshard_trainer.rollouts.meter import Meter
from reshard_trainer.rollouts.rollout import EngineName, RolloutGroup


class Standing(msgspec.Struct, frozen=True):
    """News for a producer.

    Attributes:
        published: the newest version that engines may have.
        ended: of the admissions it asked about, those that were overtaken; to be broken off.
    """

    published: PolicyVersion
    ended: frozenset[Ticket]


class Desk(Protocol):
    """What a producer needs of the desk, in this process or over a socket."""

    async def assign(
        self, engine: EngineName, version: PolicyVersion, seconds: float
    ) -> Assignment | None:
        """A prompt for an engine at this version, once one is admitted; None: not in time."""

    async def deliver(self, group: RolloutGroup) -> Verdict:
        """Hand in the group of an assignment; counted once, however often it is handed in."""

    async def give_up(self, ticket: Ticket, reason: str, charge: int) -> None:
        """End an assignment without a group."""

    async def news(
        self, known: PolicyVersion | None, tickets: frozenset[Ticket], seconds: float
    ) -> Standing:
        """What is new: at once if a version newer than `known` is published or a ticket ended."""


class DeskService:
    """The desk in the trainer's process. `Desk` says what the producers' calls promise.

    Attributes:
        desk: the rules.
        meter: where everything is counted.
    """

    def __init__(self, desk: RolloutDesk, meter: Meter) -> None:
        self.desk = desk
        self.meter = meter
        self._changed = Pulse()
        self._seen = Counters()
        self._note()

    async def assign(
        self, engine: EngineName, version: PolicyVersion, seconds: float
    ) -> Assignment | None:
        """A prompt for an engine at this version."""
        until = Until.after(seconds)
        while True:
            assignment = self.desk.assign(engine, version)
            if assignment is not None:
                self.meter.admitted(engine, assignment.publish_lag)
                self._note()
                return assignment
            if until.expired:
                return None
            await self._changed.next(until)

    async def deliver(self, group: RolloutGroup) -> Verdict:
        """Hand in the group of an assignment."""
        verdict = self.desk.deliver(group)
        if verdict is Verdict.ACCEPTED:
            for rollout in group.rollouts:
                for engine in rollout.engines[-1:]:
                    self.meter.sampled(engine, len(rollout.tokens))
        self._note()
        return verdict

    async def give_up(self, ticket: Ticket, reason: str, charge: int) -> None:
        """End an assignment without a group."""
        self.desk.give_up(ticket, reason, charge=charge)
        self._note()

    async def news(
        self, known: PolicyVersion | None, tickets: frozenset[Ticket], seconds: float
    ) -> Standing:
        """What is new."""
        until = Until.after(seconds)
        while True:
            ended = frozenset(ticket for ticket in tickets if not self.desk.runs(ticket))
            newer = known is None or self.desk.published > known
            if newer or ended or until.expired:
                return Standing(self.desk.published, ended)
            await self._changed.next(until)

    async def take(self, version: PolicyVersion, seconds: float) -> Batch:
        """The batch of the trainer's step at `version`, once it is complete.

        Raises:
            DeadlineExceeded: it is not complete in time; says what is missing.
            RolloutError: not the version whose batch is next.
            PromptsExhausted: no full batch will ever come.
        """
        until = Until.after(seconds)
        start = now()
        try:
            while True:
                batch = self.desk.take(version)
                if batch is not None:
                    self.meter.trained(version, batch.staleness)
                    return batch
                if until.expired:
                    raise DeadlineExceeded(self._missing(version, until))
                await self._changed.next(until)
        finally:
            self.meter.idle("trainer", "trainer", now() - start)
            self._note()

    def publish(self, version: PolicyVersion) -> None:
        """Engines may have this version from now on."""
        self.desk.publish(version)
        self._note()

    def save(self, version: PolicyVersion) -> SavedDesk:
        """The state that belongs into the trainer's checkpoint of `version`."""
        saved = self.desk.save(version)
        self._note()
        return saved

    def _missing(self, version: PolicyVersion, until: Until) -> str:
        counters = self.desk.counters
        return (
            f"the batch of version {version} was not complete within {until.seconds:g} s: "
            f"{self.desk.buffered} groups wait, {self.desk.running} run, the newest published "
            f"version is {self.desk.published}; so far {counters.evicted} were evicted, "
            f"{counters.given_up} given up, {counters.rejected} rejected"
        )

    def _note(self) -> None:
        """Tell the meter and everyone who waits."""
        counters = self.desk.counters
        for field in msgspec.structs.fields(Counters):
            grown = getattr(counters, field.name) - getattr(self._seen, field.name)
            if grown:
                self.meter.count(field.name, grown)
        self._seen = msgspec.structs.replace(counters)
        self.meter.levels(buffered=self.desk.buffered, running=self.desk.running)
        self._changed.beat()
