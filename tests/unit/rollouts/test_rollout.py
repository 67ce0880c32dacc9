"""Rollouts are valid values, and travel unchanged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.rollouts.values import group, rollout, spans

from reshard.errors import WireError
from reshard.wire import decode, encode
from reshard_trainer.rollouts.errors import RolloutError
from reshard_trainer.rollouts.progress import join_spans
from reshard_trainer.rollouts.rollout import (
    Prompt,
    PromptId,
    Rollout,
    RolloutGroup,
    SampleId,
    Serial,
    VersionSpan,
    faults_of_spans,
)

pieces = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=5).map(
    lambda found: sorted(found)
)


@given(pieces)
def test_spans_that_tile_have_no_faults_and_give_each_token_its_version(
    found: list[tuple[int, int]],
) -> None:
    length = sum(n for _, n in found)
    assert faults_of_spans(spans(*found), length) == []
    made = Rollout(
        SampleId(Serial(3), 1),
        PromptId("p"),
        (1,),
        tuple(range(length)),
        (-1.0,) * length,
        spans(*found),
        "length",
    )
    assert list(made.versions()) == [version for version, n in found for _ in range(n)]
    assert (made.oldest, made.newest) == (found[0][0], found[-1][0])


@given(pieces, st.data())
def test_every_damage_to_spans_is_a_fault(
    found: list[tuple[int, int]], data: st.DataObject
) -> None:
    whole = list(spans(*found))
    length = whole[-1].end
    i = data.draw(st.integers(0, len(whole) - 1))
    one = whole[i]
    damaged = data.draw(
        st.sampled_from(
            [
                whole[:i] + whole[i + 1 :],
                [*whole[:i], VersionSpan(one.version, one.start, one.end + 1), *whole[i + 1 :]],
                [*whole[:i], VersionSpan(one.version, one.start + 1, one.end), *whole[i + 1 :]],
                [*whole, VersionSpan(one.version, length, length)],
                [*whole, VersionSpan(whole[-1].version, length, length + 1)],
            ]
        )
    )
    assert faults_of_spans(damaged, length)


@given(pieces, st.data())
def test_joining_the_parts_of_a_sample_gives_the_whole(
    found: list[tuple[int, int]], data: st.DataObject
) -> None:
    versions = [version for version, n in found for _ in range(n)]
    cut = data.draw(st.integers(0, len(versions)))

    def of(part: list[int]) -> tuple[VersionSpan, ...]:
        runs = [(v, sum(1 for x in part if x == v)) for v in sorted(set(part))]
        return spans(*runs)

    assert join_spans(of(versions[:cut]), of(versions[cut:]), cut) == of(versions)


def test_versions_that_decrease_are_a_fault() -> None:
    assert faults_of_spans(spans((2, 1), (1, 1)), 2) == ["version 1 after version 2"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokens": (), "log_probs": (), "spans": ()}, "it holds no token"),
        ({"log_probs": (-1.0,)}, "2 tokens, but 1 log-probabilities"),
        ({"log_probs": (-1.0, float("nan"))}, r"log-probabilities at \[1\] are not finite"),
        ({"spans": spans((1, 1))}, r"tokens \[1, 2\) have no version"),
        ({"spans": spans((1, 3))}, "spans reach to 3, but there are 2 tokens"),
        ({"reward": float("inf")}, "reward inf is not a number to train on"),
    ],
)
def test_what_is_no_rollout_is_refused(change: dict[str, object], text: str) -> None:
    fields: dict[str, object] = {
        "id": SampleId(Serial(0), 0),
        "prompt": PromptId("p"),
        "prompt_tokens": (1,),
        "tokens": (5, 6),
        "log_probs": (-1.0, -2.0),
        "spans": spans((1, 2)),
        "finish": "stop",
    }
    Rollout(**fields)  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match=text):
        Rollout(**(fields | change))  # type: ignore[arg-type]


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(RolloutError, match="prompt 'empty': needs at least one token id"):
        Prompt(PromptId("empty"), ())


def test_a_group_holds_its_samples_in_order() -> None:
    with pytest.raises(RolloutError, match=r"must hold its samples 0, 1, \.\.\. in order"):
        RolloutGroup(Serial(3), 0, (rollout(3, 1, [0]), rollout(3, 0, [0])))
    with pytest.raises(RolloutError, match="prompt 3 must hold"):
        RolloutGroup(Serial(3), 0, (rollout(4, 0, [0]),))
    made = RolloutGroup(Serial(3), 0, (rollout(3, 0, [2, 4]), rollout(3, 1, [1, 2])))
    assert (made.oldest, made.newest) == (1, 4)


def test_a_group_travels_unchanged_and_is_validated_on_arrival() -> None:
    sent = group(7, 3, samples=2)
    assert decode(encode(sent), RolloutGroup) == sent
    wrong = encode({"serial": 7, "attempt": 0, "rollouts": [{"id": "no"}]})
    with pytest.raises(WireError, match="malformed RolloutGroup"):
        decode(wrong, RolloutGroup)


def test_an_invalid_group_does_not_survive_decoding() -> None:
    raw = encode(group(7, 3)).replace(encode("log_probs"), encode("log_probz"))
    with pytest.raises(WireError, match="log_probs"):
        decode(raw, RolloutGroup)
