"""The common order of transfers: no deadlock in any bounded window, the same on both ends."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.ids import FQN, GroupRank
from reshard.layout.region import Region
from reshard.plan import Move, RankPlan
from reshard.transport.schedule import Schedule, Transfer, make_schedule

Traffic = dict[tuple[int, int], int]
"""Number of elements by (source, destination)."""


@st.composite
def traffic(draw: st.DrawFn) -> tuple[int, Traffic]:
    size = draw(st.integers(2, 7))
    pairs = [(s, d) for s in range(size) for d in range(size) if s != d]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=20))
    return size, {pair: draw(st.integers(1, 9)) for pair in chosen}


def schedules(size: int, elements: Traffic) -> list[Schedule]:
    def moves(count: int) -> tuple[Move, ...]:
        return (Move(FQN("t"), Region((0,), (count,)), "float32", "float32"),)

    made = []
    for rank in range(size):
        sends = {GroupRank(d): moves(n) for (s, d), n in elements.items() if s == rank}
        receives = {GroupRank(s): moves(n) for (s, d), n in elements.items() if d == rank}
        made.append(make_schedule(RankPlan(GroupRank(rank), sends, receives, ()), size, 4))
    return made


def finishes(made: list[Schedule], window: int, rng: random.Random) -> bool:
    """Simulate: a message passes when both ends have it under way; each end waits in order."""
    queues = {
        (rank, way): list(getattr(schedule, way))
        for rank, schedule in enumerate(made)
        for way in ("sends", "receives")
    }
    passed: set[Transfer] = set()
    while any(queues.values()):
        under_way = {key: set(queue[:window]) for key, queue in queues.items()}
        able = [
            t
            for (rank, way), several in under_way.items()
            if way == "sends"
            for t in several
            if t not in passed and t in under_way[t.destination, "receives"]
        ]
        passed |= set(rng.sample(able, min(len(able), rng.randint(1, 3))))
        before = sum(map(len, queues.values()))
        for rank in range(len(made)):
            heads = [q for way in ("sends", "receives") if (q := queues[rank, way])]
            # The rank waits for its earliest message, and only then looks at another.
            while heads:
                first = min(heads, key=lambda q: q[0].order)
                if first[0] not in passed:
                    break
                first.pop(0)
                heads = [q for q in heads if q]
        if not able and sum(map(len, queues.values())) == before:
            return False
    return True


@given(traffic(), st.integers(1, 4), st.integers(0, 1000))
def test_no_window_deadlocks(world: tuple[int, Traffic], window: int, seed: int) -> None:
    assert finishes(schedules(*world), window, random.Random(seed))


def test_the_deadlock_oracle_can_fail() -> None:
    """Ranks that each follow an order of their own wait in a circle."""
    made = schedules(4, {(0, 2): 1, (0, 3): 1, (1, 2): 1, (1, 3): 1})
    crossed = [
        Schedule(tuple(reversed(s.sends)) if rank == 1 else s.sends, receives, {})
        for rank, s in enumerate(made)
        for receives in [tuple(reversed(s.receives)) if rank == 3 else s.receives]
    ]
    assert finishes(made, 1, random.Random(0))
    assert not finishes(crossed, 1, random.Random(0))


@given(traffic(), st.integers(1, 3))
def test_both_ends_see_the_same_messages_and_rounds(world: tuple[int, Traffic], width: int) -> None:
    made = schedules(*world)
    for rank, schedule in enumerate(made):
        for transfer in schedule.sends:
            assert transfer in made[transfer.destination].receives
        for transfer in schedule.receives:
            assert transfer in made[transfer.source].sends
        for peer, fingerprint in schedule.fingerprints.items():
            assert made[peer].fingerprints[rank] == fingerprint
        for way in (schedule.sends, schedule.receives):
            assert list(way) == sorted(way, key=lambda t: t.order)
            assert [t.round(width) for t in way] == sorted(t.round(width) for t in way)
            for key in {t.round(width) for t in way}:
                assert sum(t.round(width) == key for t in way) <= width


@pytest.mark.parametrize("bucket_bytes", [4, 64])
def test_another_bucket_size_shows_in_the_fingerprint(bucket_bytes: int) -> None:
    moves = (Move(FQN("t"), Region((0,), (4,)), "float32", "float32"),)
    plan = RankPlan(GroupRank(0), {GroupRank(1): moves}, {}, ())
    fingerprint = make_schedule(plan, 2, bucket_bytes).fingerprints[1]
    assert fingerprint != make_schedule(plan, 2, 8).fingerprints[1]


@pytest.mark.parametrize(
    "other",
    [
        Move(FQN("u"), Region((0,), (4,)), "float32", "float32"),
        Move(FQN("t"), Region((1,), (4,)), "float32", "float32"),
        Move(FQN("t"), Region((0,), (4,)), "float32", "int32"),
    ],
)
def test_other_contents_of_the_same_size_show_in_the_fingerprint(other: Move) -> None:
    one = Move(FQN("t"), Region((0,), (4,)), "float32", "float32")
    found = {
        make_schedule(RankPlan(GroupRank(0), {GroupRank(1): (m,)}, {}, ()), 2, 64).fingerprints[1]
        for m in (one, other)
    }
    assert len(found) == 2


def test_what_is_empty_is_not_sent() -> None:
    empty = (Move(FQN("t"), Region((0, 0), (0, 3)), "float32", "float32"),)
    schedule = make_schedule(RankPlan(GroupRank(0), {GroupRank(1): empty}, {}, ()), 2, 64)
    assert (schedule.sends, schedule.fingerprints) == ((), {})
