"""The desk: gives out prompts through the gate, takes groups into the buffer, hands out batches.

One plain object, driven by one thread, without clock or sockets: gate, book of prompts and buffer
always agree, and all of it saves and restores with the trainer's checkpoint. Not here: waiting
(`office.py`), engines (`producer.py`), other machines (`desk_server.py`).
"""

import logging
from dataclasses import dataclass

import msgspec

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.buffer import Batch, ReplayBuffer, Verdict
from reshard_trainer.rollouts.counters import Counters
from reshard_trainer.rollouts.errors import PromptsExhausted, RolloutError
from reshard_trainer.rollouts.gate import AdmissionGate, Ticket
from reshard_trainer.rollouts.prompts import PromptBook, PromptSource, Record
from reshard_trainer.rollouts.rollout import EngineName, Prompt, RolloutGroup, Serial
from reshard_trainer.rollouts.serials import SerialSet
from reshard_trainer.rollouts.staleness import Overdue, StalenessBound

logger = logging.getLogger(__name__)

MAX_CHARGES = 8
"""How often a prompt may fail by its own fault, or grow too old, before it is dropped."""


class Assignment(msgspec.Struct, frozen=True):
    """A prompt that an engine may start now.

    Attributes:
        serial: of the prompt.
        attempt: how often it had been given out before.
        prompt: what to continue.
        version: the engine's version at admission.
        publish_lag: versions between that and the newest published one (publish lag).
    """

    serial: Serial
    attempt: int
    prompt: Prompt
    version: PolicyVersion
    publish_lag: int

    @property
    def ticket(self) -> Ticket:
        """By which it is delivered or given up."""
        return Ticket(self.serial, self.attempt)


class SavedDesk(msgspec.Struct, frozen=True):
    """All that a resumed run needs, beside its prompts; goes into the trainer's checkpoint.

    Attributes:
        version: of the trainer whose checkpoint this belongs to.
        batch: groups a step, which must not change.
        next_serial: the first prompt that was never given out.
        records: serial, attempts and charges of every prompt that is not finished.
        groups: complete groups that were not trained.
        counters: up to here.
    """

    version: PolicyVersion
    batch: int
    next_serial: Serial
    records: tuple[tuple[Serial, int, int], ...]
    groups: tuple[RolloutGroup, ...]
    counters: Counters


@dataclass(frozen=True, slots=True)
class DeskSettings:
    """How a desk works.

    Attributes:
        bound: batch, greatest staleness, cadence of publishing.
        overdue: what becomes of groups beyond the bound.
        max_charges: after how many evictions and failures of its own a prompt is dropped.
    """

    bound: StalenessBound
    overdue: Overdue = "evict"
    max_charges: int = MAX_CHARGES


class RolloutDesk:
    """See the module.

    Attributes:
        published: the newest version that engines may have.
        next_step: the version at which the trainer takes its next batch.
        counters: what became of every group.
    """

    def __init__(
        self,
        settings: DeskSettings,
        prompts: PromptSource,
        saved: SavedDesk | None = None,
    ) -> None:
        """Open, at version 0 or where a run was saved.

        Args:
            settings: how it works.
            prompts: the run's stream, the same when a run is resumed.
            saved: from `save`.

        Raises:
            RolloutError: it was saved with another batch size.
        """
        start = saved.version if saved else PolicyVersion(0)
        self._settings = settings
        self._bound = settings.bound
        self._gate = AdmissionGate(settings.bound, start)
        self._book = PromptBook(prompts)
        self._buffer = ReplayBuffer(settings.bound, overdue=settings.overdue)
        self._handed_out: Batch | None = None
        self.published = start
        self.next_step = start
        self.counters = Counters()
        if saved:
            self._restore(saved)

    @property
    def buffered(self) -> int:
        """Groups that wait for the trainer."""
        return len(self._buffer)

    @property
    def running(self) -> int:
        """Groups that are being generated."""
        return self._gate.running

    def runs(self, ticket: Ticket) -> bool:
        """Whether an admission still stands: neither delivered, nor given up, nor overtaken."""
        return self._gate.runs(ticket)

    def assign(self, engine: EngineName, version: PolicyVersion) -> Assignment | None:
        """A prompt for an engine at this version; None: not now.

        Raises:
            RolloutError: no such version was published.
        """
        if version > self.published:
            raise RolloutError(
                f"engine {engine} says that it serves version {version}, but the newest published "
                f"one is {self.published}: the label is another run's; refit the engine first"
            )
        if not self._gate.admits(version):
            return None
        given = self._book.give_out()
        if given is None:
            return None
        ticket, prompt = given
        self._gate.start(ticket, version)
        self.counters.assigned += 1
        return Assignment(ticket.serial, ticket.attempt, prompt, version, self.published - version)

    def deliver(self, group: RolloutGroup) -> Verdict:
        """Take in the group of an admission, which ends with this."""
        ticket = Ticket(group.serial, group.attempt)
        if not self._gate.runs(ticket):
            return self._deliver_late(group)
        verdict = self._buffer.offer(group, published=self.published, next_step=self.next_step)
        match verdict:
            case Verdict.ACCEPTED:
                self._gate.accept(ticket)
                self.counters.accepted += 1
            case Verdict.EVICTED:
                self._gate.stop(ticket)
                self.counters.evicted_running += 1
                self._ask_again(group.serial, "too old when it was delivered")
            case Verdict.REJECTED:
                self._gate.stop(ticket)
                self.counters.rejected += 1
                logger.warning(
                    "prompt %d: rejected a group with version %d, the newest published one is %d",
                    group.serial, group.newest, self.published,
                )  # fmt: skip
                self._book.put_back(group.serial)
            case Verdict.DUPLICATE | Verdict.FULL | Verdict.LATE:
                raise RolloutError(f"{ticket} runs, but the buffer says {verdict.value}")
        return verdict

    def give_up(self, ticket: Ticket, reason: str, *, charge: int = 0) -> None:
        """An admission ends without a group; its prompt is asked again.

        Args:
            ticket: which.
            reason: for the log.
            charge: 1 if the prompt itself may be to blame, 0 if the engine is.
        """
        if not self._gate.runs(ticket):
            return
        self._gate.stop(ticket)
        self.counters.given_up += 1
        self._ask_again(ticket.serial, reason, charge=charge)

    def publish(self, version: PolicyVersion) -> None:
        """Engines may have this version from now on.

        Raises:
            RolloutError: it is older than one before.
        """
        if version < self.published:
            raise RolloutError(
                f"version {version} cannot be published after {self.published}; a resumed run "
                "opens a new desk from its checkpoint"
            )
        self.published = version

    def take(self, version: PolicyVersion) -> Batch | None:
        """The batch for the step that the trainer at `version` makes; None: not complete yet.

        Taking the batch of `version` says that the step before was made.

        Raises:
            RolloutError: not the version whose batch is next.
            PromptsExhausted: no full batch will ever come.
        """
        if version != self.next_step:
            raise RolloutError(
                f"the trainer at version {version} asks for a batch, but the next one belongs to "
                f"version {self.next_step}: one batch of {self._bound.batch} groups for each "
                "optimizer step, in order"
            )
        self._confirm(version)
        self._advance()
        batch = self._buffer.take(version)
        if batch is None:
            self._check_exhausted()
            return None
        self._handed_out = batch
        self.next_step = PolicyVersion(version + 1)
        self._advance()
        return batch

    def save(self, version: PolicyVersion) -> SavedDesk:
        """The state that belongs into the trainer's checkpoint of `version`.

        A batch that was handed out counts as trained if `version` is after its step.

        Raises:
            RolloutError: the trainer cannot be at this version.
        """
        if version not in (self.next_step, self.next_step - 1) or (
            version < self.next_step and self._handed_out is None
        ):
            raise RolloutError(
                f"a checkpoint of version {version} cannot be made now: the next batch belongs to "
                f"version {self.next_step}"
            )
        self._confirm(version)
        untrained = self._handed_out.groups if self._handed_out else ()
        return SavedDesk(
            version=version,
            batch=self._bound.batch,
            next_serial=self._book.next_serial,
            records=tuple(
                (serial, record.attempts, record.charges)
                for serial, record in sorted(self._book.records.items())
            ),
            groups=(*untrained, *self._buffer.groups),
            counters=msgspec.structs.replace(self.counters),
        )

    def _restore(self, saved: SavedDesk) -> None:
        if saved.batch != self._bound.batch:
            raise RolloutError(
                f"the run was saved with batches of {saved.batch} groups and cannot go on with "
                f"{self._bound.batch}: its version counts batches"
            )
        records = {serial: Record(attempts, charges) for serial, attempts, charges in saved.records}
        held = [group.serial for group in saved.groups]
        self._book.restore(saved.next_serial, records, held)
        closed = SerialSet(below=saved.next_serial)
        for serial in self._book.waiting:
            closed.discard(serial)
        self._buffer.restore(saved.groups, closed)
        for _ in held:
            self._gate.readmit()
        # What ran when the run was saved has ended with it.
        lost = saved.counters.assigned - _ended(saved.counters)
        self.counters = msgspec.structs.replace(
            saved.counters, given_up=saved.counters.given_up + lost
        )

    def _advance(self) -> None:
        """Put an end to what will be too old for the next step."""
        for group in self._buffer.evict(self.next_step):
            self._gate.evict()
            self.counters.evicted_waiting += 1
            self._ask_again(group.serial, "too old before the trainer took it")
        if self._settings.overdue != "evict":
            return
        for ticket in self._gate.overtaken(self.next_step):
            self._gate.stop(ticket)
            self.counters.evicted_running += 1
            self._ask_again(ticket.serial, "too old while it ran")

    def _confirm(self, version: PolicyVersion) -> None:
        """The trainer is at `version`: the batch before it has been trained."""
        batch = self._handed_out
        if batch is None or batch.version >= version:
            return
        for group in batch.groups:
            self._book.finish(group.serial)
        self.counters.trained += len(batch.groups)
        self._handed_out = None

    def _ask_again(self, serial: Serial, reason: str, *, charge: int = 1) -> None:
        charges = self._book.put_back(serial, charge=charge)
        logger.info("prompt %d is asked again: %s", serial, reason)
        if charges >= self._settings.max_charges:
            self._book.finish(serial)
            self._buffer.close(serial)
            self.counters.dropped += 1
            logger.warning("prompt %d is dropped after %d failures: %s", serial, charges, reason)

    def _deliver_late(self, group: RolloutGroup) -> Verdict:
        if self._buffer.closed(group.serial):
            self.counters.duplicates += 1
            return Verdict.DUPLICATE
        self.counters.late += 1
        return Verdict.LATE

    def _check_exhausted(self) -> None:
        if self._book.exhausted and not self.running:
            raise PromptsExhausted(
                f"the stream of prompts has ended; {self.buffered} groups are left, a batch takes "
                f"{self._bound.batch}"
            )


def _ended(counters: Counters) -> int:
    return counters.accepted + counters.evicted_running + counters.given_up + counters.rejected
