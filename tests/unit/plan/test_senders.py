"""The busiest sender is as little busy as an LP says it can be."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.plan.oracles import (
    amounts_of,
    first_holder,
    least_largest_load,
    round_robin,
)
from tests.unit.plan.worlds import Case, both, cases

from reshard.dtypes import DType, itemsize
from reshard.ids import FQN, GroupRank
from reshard.layout.sharding import Mesh, Replicate, Shard, Sharding
from reshard.layout.side import SideLayout
from reshard.plan import make_plan
from reshard.plan.senders import Ranks, balance

_WIRE: list[DType] = ["float32", "bfloat16", "int8", "int64"]

holder_sets = st.sets(st.integers(0, 7), min_size=1, max_size=5).map(
    lambda ranks: tuple(GroupRank(rank) for rank in sorted(ranks))
)


@given(st.dictionaries(holder_sets, st.integers(1, 10_000), min_size=1, max_size=12))
def test_the_busiest_sender_is_least_busy(amounts: dict[Ranks, int]) -> None:
    shares, bound = balance(amounts)
    loads: Counter[int] = Counter()
    for holders, by_rank in shares.items():
        assert set(by_rank) <= set(holders)
        assert sum(by_rank.values()) == amounts[holders]
        loads.update(by_rank)
    least = least_largest_load({tuple(map(int, h)): n for h, n in amounts.items()})
    assert float(bound) == pytest.approx(least)
    assert max(loads.values()) < least + 1 + 1e-6


@given(cases())
def test_a_plan_is_within_one_percent_of_the_lp_and_never_worse_than_simple_rules(
    case: Case,
) -> None:
    plan = make_plan(*both(case))
    amounts = amounts_of(plan, case)
    least = least_largest_load(amounts)
    largest = max(plan.sent_bytes.values(), default=0)
    # The LP may cut an element of four bytes; a plan may not.
    assert plan.bounds.max_sent_bytes == pytest.approx(least, abs=1)
    assert largest < least + 4 + 1e-6
    assert largest <= first_holder(amounts)
    assert largest <= round_robin(amounts, 4)


@given(st.lists(st.sampled_from(sorted(_WIRE)), min_size=2, max_size=6))
def test_elements_of_different_sizes_are_balanced_together(dtypes: list[DType]) -> None:
    """Each tensor on another pair of overlapping replicas; the LP knows only bytes."""
    sources, destinations, amounts = [], [], Counter[tuple[int, ...]]()
    for i, dtype in enumerate(dtypes):
        name, shape = [FQN(f"t{i}")], (40 + i, 50)
        replicas = Sharding(Mesh((3,), (i, i + 1, i + 3)), (Replicate(),), shape)
        sources.append((name, replicas, dtype))
        wanted = Sharding(Mesh((2,), (100, 101)), (Shard(0),), shape)
        destinations.append((name, wanted, dtype))
        amounts[i, i + 1, i + 3] += (40 + i) * 50 * itemsize(dtype)
    plan = make_plan(SideLayout.from_shardings(sources), SideLayout.from_shardings(destinations))
    least = least_largest_load(amounts)
    assert plan.bounds.max_sent_bytes == pytest.approx(least, abs=1)
    assert max(plan.sent_bytes.values()) <= 1.01 * least


def test_the_lp_oracle_can_fail() -> None:
    amounts = {(0, 1): 100, (0,): 100}
    assert least_largest_load(amounts) == pytest.approx(100)
    assert first_holder(amounts) == 200
    assert round_robin(amounts, 4) == 152
    shares, bound = balance({tuple(map(GroupRank, h)): n for h, n in amounts.items()})
    assert bound == Fraction(100)
    assert shares[GroupRank(0), GroupRank(1)] == {1: 100}


def test_the_bound_is_exact_where_units_hide_it() -> None:
    """Two of three units are held by rank 0 alone: the average, 1.5, is no bound."""
    shares, bound = balance({(GroupRank(0),): 8, (GroupRank(1),): 4}, unit=4)
    assert bound == 8
    assert shares == {(0,): {0: 8}, (1,): {1: 4}}


def test_nothing_to_send() -> None:
    assert balance({}) == ({}, Fraction(0))
