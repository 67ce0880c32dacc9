"""Every destination element comes once, from a rank that holds it; the oracle can fail."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.plan.oracles import assert_covers
from tests.unit.plan.worlds import Case, both, cases, cut, sides

from reshard.ids import GroupRank
from reshard.layout.region import Region
from reshard.plan import TransferPlan, make_plan


@given(cases())
def test_every_destination_element_comes_once_from_a_holder(case: Case) -> None:
    plan = make_plan(*both(case))
    assert_covers(plan, case)
    assert plan.redundancy == 1.0
    assert max(plan.received_bytes.values(), default=0) == plan.bounds.max_received_bytes
    assert sum(plan.sent_bytes.values()) == sum(plan.received_bytes.values())


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_the_reports_does_not_matter(case: Case, random: object) -> None:
    sources, destinations = both(case)
    digest = make_plan(sources, destinations).digest
    random.shuffle(sources)  # type: ignore[attr-defined]
    random.shuffle(destinations)  # type: ignore[attr-defined]
    assert make_plan(sources, destinations).digest == digest


@given(cases())
def test_reports_and_shardings_give_the_same_plan(case: Case) -> None:
    assert make_plan(*both(case)) == make_plan(*sides(case))


@given(cases())
def test_the_parts_of_all_ranks_are_the_plan(case: Case) -> None:
    plan = make_plan(*both(case))
    ranks = {rank for op in plan.ops for rank in (op.source, *op.destinations)}
    parts = {rank: plan.for_rank(rank) for rank in ranks}
    sent: Counter[tuple[str, int, int, Region]] = Counter()
    for rank, part in parts.items():
        for peer, moves in part.sends.items():
            assert moves == parts[peer].receives[rank]
            sent.update((move.name, rank, peer, move.region) for move in moves)
        assert sum(m.nbytes for moves in part.sends.values() for m in moves) == (
            plan.sent_bytes.get(rank, 0)
        )
        sent.update((move.name, rank, rank, move.region) for move in part.local)
    listed = Counter(
        (transfer.name, transfer.source, transfer.destination, region)
        for transfer in plan.transfers()
        for region in transfer.regions
    )
    assert sent == listed


def test_a_rank_without_a_part() -> None:
    plan = make_plan(*both({"w": (cut(2, 0), cut(4, 1, first=2))}))
    part = plan.for_rank(GroupRank(99))
    assert (part.sends, part.receives, len(part.local)) == ({}, {}, 0)


def test_the_cover_oracle_can_fail() -> None:
    case = {"w": (cut(2, 0), cut(2, 1, first=2))}
    plan = make_plan(*both(case))
    lost = TransferPlan(plan.classes, plan.ops[1:], plan.bounds, ())
    assert lost.redundancy < 1.0
    with pytest.raises(AssertionError, match="w on rank 2"):
        assert_covers(lost, case)
    doubled = TransferPlan(plan.classes, plan.ops + plan.ops[:1], plan.bounds, ())
    assert doubled.redundancy > 1.0
    with pytest.raises(AssertionError, match="w on rank 2"):
        assert_covers(doubled, case)
    wrong = dataclasses.replace(plan.ops[0], source=GroupRank(1))
    with pytest.raises(AssertionError, match="rank 1 does not hold all it sends"):
        assert_covers(TransferPlan(plan.classes, (wrong, *plan.ops[1:]), plan.bounds, ()), case)
