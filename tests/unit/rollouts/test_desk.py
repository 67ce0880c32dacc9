"""The desk against a model that keeps every group's whole story."""

from collections.abc import Iterable

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.rollouts.simulated import Prompts
from tests.unit.rollouts.values import group

from reshard.ids import PolicyVersion
from reshard.wire import decode, encode
from reshard_trainer.rollouts.buffer import Verdict
from reshard_trainer.rollouts.desk import Assignment, DeskSettings, RolloutDesk, SavedDesk
from reshard_trainer.rollouts.errors import PromptsExhausted, RolloutError
from reshard_trainer.rollouts.rollout import EngineName, Serial
from reshard_trainer.rollouts.staleness import StalenessBound

V = PolicyVersion
ENGINE = EngineName("e")


class DeskMachine(RuleBasedStateMachine):
    """Random orders of everything that can happen at a desk, restarts included."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = StalenessBound(batch=2, max_staleness=2, publish_every=2)
        self.settings = DeskSettings(self.bound, max_charges=3)
        self.desk = RolloutDesk(self.settings, Prompts())
        self.trainer = 0
        self.running: dict[tuple[int, int], tuple[Assignment, int]] = {}
        self.trained: list[int] = []
        self.batch: list[int] | None = None

    @rule(lag=st.integers(0, 3))
    def assign(self, lag: int) -> None:
        version = max(0, self.desk.published - lag)
        before = self.desk.counters.accepted, self.desk.running
        given = self.desk.assign(ENGINE, V(version))
        # Trained groups and those at hand, counted from the model's own books.
        accepted = len(self.trained) + len(self.batch or ()) + self.desk.buffered
        room = accepted + before[1] < (2 + version + 1) * 2
        assert (given is not None) == room
        if given is not None:
            assert given.publish_lag == self.desk.published - version
            self.running[given.serial, given.attempt] = (given, version)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), newer=st.integers(0, 2))
    def deliver(self, data: st.DataObject, newer: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        given, version = self.running.pop(key)
        label = version + newer
        stands = self.desk.runs(given.ticket)
        verdict = self.desk.deliver(group(given.serial, label, attempt=given.attempt))
        if not stands:
            assert verdict in (Verdict.LATE, Verdict.DUPLICATE)
        elif label > self.desk.published:
            assert verdict is Verdict.REJECTED
        elif self.desk.next_step - label > 2:
            assert verdict is Verdict.EVICTED
        else:
            assert verdict is Verdict.ACCEPTED
            again = self.desk.deliver(group(given.serial, label, attempt=given.attempt))
            assert again is Verdict.DUPLICATE

    @precondition(lambda self: self.running)
    @rule(data=st.data(), charge=st.integers(0, 1))
    def give_up(self, data: st.DataObject, charge: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        given, _ = self.running.pop(key)
        self.desk.give_up(given.ticket, "test", charge=charge)
        assert not self.desk.runs(given.ticket)

    @rule()
    def step(self) -> None:
        batch = self.desk.take(V(self.trainer + (self.batch is not None)))
        if self.batch is not None:
            self.trained += self.batch
            self.batch = None
            self.trainer += 1
            if self.trainer % 2 == 0 and self.desk.published < self.trainer:
                self.desk.publish(V(self.trainer))
        if batch is None:
            return
        assert len(batch.groups) == 2
        assert all(0 <= lag <= 2 for lag in batch.staleness)
        assert list(batch.staleness) == sorted(batch.staleness, reverse=True)
        self.batch = [taken.serial for taken in batch.groups]
        assert not set(self.batch) & set(self.trained)

    @rule()
    def restart(self) -> None:
        """The trainer stops after its step, or before it, and goes on from the checkpoint."""
        saved = self.desk.save(V(self.trainer))
        assert decode(encode(saved), SavedDesk) == saved
        self.desk = RolloutDesk(self.settings, Prompts(), saved)
        self.running.clear()
        self.batch = None
        assert self.desk.published == self.desk.next_step == self.trainer
        self.accounts_for_every_prompt()

    @invariant()
    def counters_add_up(self) -> None:
        c = self.desk.counters
        assert c.assigned == (
            self.desk.running + c.accepted + c.evicted_running + c.rejected + c.given_up
        )
        at_hand = self.desk.buffered + len(self.batch or ())
        # A batch that was lost with the trainer is at hand again: it was accepted once.
        assert c.accepted == c.trained + at_hand + c.evicted_waiting
        assert c.trained == len(self.trained)

    @invariant()
    def accounts_for_every_prompt(self) -> None:
        """No serial is lost: each is trained, dropped, at hand, running, or will come again."""
        saved = self.desk.save(V(self.trainer))
        unfinished = {serial for serial, _, _ in saved.records}
        assert not unfinished & set(self.trained)
        finished = saved.next_serial - len(unfinished)
        assert finished == len(self.trained) + self.desk.counters.dropped
        assert {g.serial for g in saved.groups} <= unfinished


DeskMachine.TestCase.settings = hypothesis_settings(
    max_examples=120, stateful_step_count=60, deadline=None
)
TestDesk = DeskMachine.TestCase


def desk(
    batch: int = 1, staleness: int = 0, *, prompts: int | None = None, charges: int = 8
) -> RolloutDesk:
    return RolloutDesk(
        DeskSettings(StalenessBound(batch, staleness), max_charges=charges), Prompts(prompts)
    )


def assigned(found: RolloutDesk, version: int = 0) -> Assignment:
    given = found.assign(ENGINE, V(version))
    assert given is not None
    return given


def deliver_all(found: RolloutDesk, serials: Iterable[int], version: int) -> None:
    for serial in serials:
        assert found.deliver(group(serial, version)) is Verdict.ACCEPTED


def test_a_label_of_another_run_is_refused() -> None:
    found = desk()
    with pytest.raises(RolloutError, match="says that it serves version 4, but the newest"):
        found.assign(ENGINE, V(4))


def test_versions_are_published_in_order() -> None:
    found = desk()
    found.publish(V(3))
    with pytest.raises(RolloutError, match="version 2 cannot be published after 3"):
        found.publish(V(2))


def test_batches_belong_to_versions_in_order() -> None:
    found = desk()
    with pytest.raises(RolloutError, match="the next one belongs to version 0"):
        found.take(V(1))
    assigned(found)
    deliver_all(found, [0], 0)
    assert found.take(V(0)) is not None
    with pytest.raises(RolloutError, match="the next one belongs to version 1"):
        found.take(V(0))


def test_a_checkpoint_belongs_to_the_version_of_the_trainer() -> None:
    found = desk()
    with pytest.raises(RolloutError, match="a checkpoint of version 1 cannot be made now"):
        found.save(V(1))


def test_a_run_goes_on_with_its_own_batch_size() -> None:
    saved = desk(batch=4).save(V(0))
    with pytest.raises(RolloutError, match="saved with batches of 4 groups"):
        RolloutDesk(DeskSettings(StalenessBound(2, 0)), Prompts(), saved)


def test_a_prompt_that_always_fails_is_dropped_and_said_so() -> None:
    found = desk(charges=3)
    for attempt in range(3):
        given = assigned(found)
        assert (given.serial, given.attempt) == (0, attempt)
        found.give_up(given.ticket, "no answer", charge=1)
    assert found.counters.dropped == 1
    assert assigned(found).serial == 1


def test_an_engines_failures_never_cost_a_prompt() -> None:
    found = desk(charges=1)
    for _ in range(20):
        found.give_up(assigned(found).ticket, "the engine died", charge=0)
    assert assigned(found).serial == 0


def test_the_end_of_the_prompts_is_told() -> None:
    found = desk(batch=2, staleness=1, prompts=3)
    for _ in range(3):
        assigned(found)
    deliver_all(found, [0, 1, 2], 0)
    assert found.take(V(0)) is not None
    with pytest.raises(PromptsExhausted, match="1 groups are left, a batch takes 2"):
        found.take(V(1))


def test_a_dropped_group_does_not_pin_the_resume_position() -> None:
    """One group of 150 is dropped as stale: a resumed run neither replays nor skips a prompt."""
    bound = StalenessBound(batch=10, max_staleness=0)
    found = RolloutDesk(DeskSettings(bound, max_charges=1), Prompts(150))
    trained: list[int] = []
    lost = assigned(found)
    for version in range(10):
        if version:
            found.publish(V(version))
        while (given := found.assign(ENGINE, V(version))) is not None:
            found.deliver(group(given.serial, version, attempt=given.attempt))
        batch = found.take(V(version))
        if batch is None:
            # The straggler holds the last place of step 0 until it is given up.
            assert version == 0
            assert found.deliver(group(lost.serial, 5)) is Verdict.REJECTED
            again = assigned(found)
            assert again.serial == lost.serial
            found.give_up(again.ticket, "stale", charge=1)
            replacement = assigned(found)
            found.deliver(group(replacement.serial, version))
            batch = found.take(V(version))
        assert batch is not None
        trained += [taken.serial for taken in batch.groups]
    assert found.counters.dropped == 1
    saved = found.save(V(10))
    assert saved.next_serial == 101
    assert saved.records == ()
    resumed = RolloutDesk(DeskSettings(bound, max_charges=1), Prompts(150), saved)
    for version in range(10, 14):
        resumed.publish(V(version))
        while (given := resumed.assign(ENGINE, V(version))) is not None:
            resumed.deliver(group(given.serial, version, attempt=given.attempt))
        batch = resumed.take(V(version))
        assert batch is not None
        trained += [taken.serial for taken in batch.groups]
    assert sorted(trained) == [s for s in range(141) if s != lost.serial]


def test_two_lags_are_told_apart() -> None:
    """Data staleness is the trainer's distance, publish lag the engine's."""
    found = desk(batch=1, staleness=3)
    assigned(found)
    deliver_all(found, [0], 0)
    assert found.take(V(0)) is not None
    found.publish(V(1))
    late = assigned(found, version=0)
    assert late.publish_lag == 1
    deliver_all(found, [Serial(late.serial)], 0)
    batch = found.take(V(1))
    assert batch is not None
    assert batch.staleness == (1,)
