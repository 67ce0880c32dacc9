"""The gate, the buffer and the book of prompts, each against a plain model of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.rollouts.values import group

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.buffer import ReplayBuffer, Verdict
from reshard_trainer.rollouts.errors import RolloutError
from reshard_trainer.rollouts.gate import AdmissionGate, Ticket
from reshard_trainer.rollouts.prompts import PromptBook, ShuffledPrompts
from reshard_trainer.rollouts.rollout import Prompt, PromptId, Serial
from reshard_trainer.rollouts.serials import SerialSet
from reshard_trainer.rollouts.staleness import StalenessBound

V = PolicyVersion


def bound(batch: int = 2, max_staleness: int = 1, publish_every: int = 1) -> StalenessBound:
    return StalenessBound(batch, max_staleness, publish_every)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ((0, 0, 1), "batch 0: at least one group a step"),
        ((1, -1, 1), "max_staleness -1: 0 or more"),
        ((1, 0, 0), "publish_every 0: at least 1"),
        ((1, 1, 3), "set max_staleness >= 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: tuple[int, int, int], text: str) -> None:
    with pytest.raises(RolloutError, match=text):
        StalenessBound(*settings)


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from(["start", "accept", "stop", "evict"]), st.integers(0, 6))),
)
def test_the_gate_admits_exactly_by_the_formula(
    batch: int, staleness: int, start: int, steps: list[tuple[str, int]]
) -> None:
    gate = AdmissionGate(bound(batch, staleness), V(start))
    accepted, number = start * batch, 0
    running: list[Ticket] = []
    for action, version in steps:
        if action == "start":
            room = accepted + len(running) < (staleness + version + 1) * batch
            assert gate.admits(V(version)) == room
            ticket = Ticket(Serial(number), 0)
            number += 1
            if room:
                gate.start(ticket, V(version))
                running.append(ticket)
            else:
                with pytest.raises(RolloutError, match="is not admitted on an engine at version"):
                    gate.start(ticket, V(version))
        elif action in ("accept", "stop") and running:
            ticket = running.pop(version % len(running))
            gate.accept(ticket) if action == "accept" else gate.stop(ticket)
            accepted += action == "accept"
            assert not gate.runs(ticket)
        elif action == "evict" and accepted > start * batch:
            gate.evict()
            accepted -= 1
        assert (gate.accepted, gate.running) == (accepted, len(running))


def test_after_a_restart_accepted_counts_from_the_version() -> None:
    assert AdmissionGate(bound(batch=8), V(5)).accepted == 40


def test_running_groups_that_can_only_be_too_old_are_named() -> None:
    gate = AdmissionGate(bound(batch=2, max_staleness=1), V(0))
    gate.start(Ticket(Serial(0), 0), V(0))
    gate.start(Ticket(Serial(1), 0), V(1))
    assert gate.overtaken(V(1)) == ()
    assert gate.overtaken(V(2)) == (Ticket(Serial(0), 0),)
    with pytest.raises(RolloutError, match="runs already"):
        gate.start(Ticket(Serial(1), 0), V(1))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 3))
def test_the_buffer_hands_out_the_oldest_first_and_never_what_is_too_old(
    versions: list[int], staleness: int
) -> None:
    buffer = ReplayBuffer(bound(1, staleness), capacity=100)
    for serial, version in enumerate(versions):
        verdict = buffer.offer(group(serial, version), published=V(3), next_step=V(0))
        assert verdict is Verdict.ACCEPTED
    model = sorted((version, serial) for serial, version in enumerate(versions))
    trainer = V(3)
    evicted = buffer.evict(trainer)
    assert [(g.oldest, g.serial) for g in evicted] == [m for m in model if 3 - m[0] > staleness]
    kept = [m for m in model if 3 - m[0] <= staleness]
    for version, serial in kept:
        batch = buffer.take(trainer)
        assert batch is not None
        assert [(g.oldest, g.serial) for g in batch.groups] == [(version, serial)]
        assert batch.staleness == (3 - version,)
    assert buffer.take(trainer) is None


def test_the_buffer_says_what_it_did() -> None:
    buffer = ReplayBuffer(bound(batch=1, max_staleness=1), capacity=1)

    def offer(serial: int, version: int, next_step: int = 3) -> Verdict:
        return buffer.offer(group(serial, version), published=V(3), next_step=V(next_step))

    assert offer(0, 1) is Verdict.EVICTED
    assert offer(0, 4) is Verdict.REJECTED
    assert offer(0, 3) is Verdict.ACCEPTED
    assert offer(0, 3) is Verdict.DUPLICATE
    assert offer(1, 3) is Verdict.FULL
    assert buffer.take(V(3)) is not None
    assert offer(0, 3) is Verdict.DUPLICATE
    assert offer(1, 3) is Verdict.ACCEPTED


def test_with_importance_weights_old_groups_are_kept_and_listed() -> None:
    buffer = ReplayBuffer(bound(batch=2, max_staleness=0), overdue="importance_weight")
    for serial, version in ((0, 3), (1, 1)):
        assert (
            buffer.offer(group(serial, version), published=V(3), next_step=V(3)) is Verdict.ACCEPTED
        )
    assert buffer.evict(V(3)) == ()
    batch = buffer.take(V(3))
    assert batch is not None
    assert batch.overdue == {1}
    assert batch.staleness == (2, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20))))
def test_a_set_of_serials_is_a_set(steps: list[tuple[bool, int]]) -> None:
    made, model = SerialSet(), set[int]()
    for add, serial in steps:
        (made.add if add else made.discard)(Serial(serial))
        (model.add if add else model.discard)(serial)
        assert [s for s in range(22) if Serial(s) in made] == sorted(model)
        assert len(made) == len(model)
        assert made.below not in made
        assert all(s > made.below for s in made.above)


def prompts(n: int) -> list[Prompt]:
    return [Prompt(PromptId(f"p{i}"), (i,)) for i in range(n)]


def test_every_epoch_is_another_order_of_all_prompts() -> None:
    stream = ShuffledPrompts(prompts(10), seed=3, epochs=2)
    names = [stream.prompt(Serial(s)) for s in range(20)]
    assert {p.name for p in names[:10] if p} == {p.name for p in names[10:] if p}
    assert names[:10] != names[10:]
    assert stream.prompt(Serial(20)) is None
    again = ShuffledPrompts(prompts(10), seed=3, epochs=2)
    assert [again.prompt(Serial(s)) for s in range(20)] == names
    assert again.prompt(Serial(3)) != ShuffledPrompts(prompts(10), seed=4).prompt(Serial(3))


def test_a_stream_without_prompts_is_refused() -> None:
    with pytest.raises(RolloutError, match="there are no prompts"):
        ShuffledPrompts([], seed=0)


def test_the_book_gives_what_came_back_first_and_counts_attempts() -> None:
    book = PromptBook(ShuffledPrompts(prompts(3), seed=0, epochs=1))
    tickets = [given[0] for given in (book.give_out() for _ in range(3)) if given]
    assert tickets == [Ticket(Serial(s), 0) for s in range(3)]
    assert book.give_out() is None
    assert book.exhausted
    assert book.put_back(Serial(2)) == 0
    assert book.put_back(Serial(1), charge=1) == 1
    assert not book.exhausted
    again = [given[0] for given in (book.give_out() for _ in range(2)) if given]
    assert again == [Ticket(Serial(1), 1), Ticket(Serial(2), 1)]
    book.finish(Serial(0))
    assert book.out == {1, 2}
    assert set(book.records) == {1, 2}
