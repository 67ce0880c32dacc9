"""The busiest sender is as little busy as an LP says it can be."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.plan.oracles import (
    Amounts,
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


def hsdp(shapes: list[tuple[tuple[int, ...], int]]) -> tuple[SideLayout, SideLayout, Amounts]:
    """FSDP over 64 ranks, four replicas, to 16 engine replicas of 8 tensor-parallel ranks.

    Each shape with the dim that the engine cuts; the amounts are worked out from the chunk rule.
    """
    trainer = Mesh((4, 64), tuple(range(256)))
    engine = Mesh((16, 8), tuple(range(256, 384)))
    held, needed, amounts = [], [], Counter[tuple[int, ...]]()
    for number, (shape, dim) in enumerate(shapes):
        names = [FQN(f"layers.{i}.w{number}") for i in range(3)]
        held.append((names, Sharding(trainer, (Replicate(), Shard(0)), shape), _WIRE[0]))
        needed.append((names, Sharding(engine, (Replicate(), Shard(dim)), shape), _WIRE[1]))
        step = -(-shape[0] // 64)
        for shard in range(64):
            rows = max(0, min(step, shape[0] - shard * step))
            holders = tuple(replica * 64 + shard for replica in range(4))
            # Sixteen engine replicas want each element, in two bytes, of three layers.
            amounts[holders] += rows * shape[1] * 2 * 3 * 16
    return SideLayout.from_shardings(held), SideLayout.from_shardings(needed), amounts


@pytest.mark.parametrize(
    "shapes",
    [
        [((8192, 8192), 0), ((28672, 8192), 0), ((8192, 28672), 1)],
        # Rows that 64 ranks do not share evenly: 128,256 are 64 x 2,004; of 1,000, two are idle.
        [((128256, 8192), 0), ((1000, 512), 1), ((70, 64), 1), ((8192, 1024), 0)],
    ],
)
def test_replicas_of_256_ranks_share_the_sending(
    shapes: list[tuple[tuple[int, ...], int]],
) -> None:
    sources, destinations, amounts = hsdp(shapes)
    plan = make_plan(sources, destinations)
    least = least_largest_load(amounts)
    largest = max(plan.sent_bytes.values())
    assert sum(plan.sent_bytes.values()) == sum(amounts.values())
    assert plan.bounds.max_sent_bytes == pytest.approx(least, rel=1e-6)
    assert largest <= 1.01 * least
    assert largest <= first_holder(amounts) / 3.9
    # Round robin: the first holder of a set begins, so that it sends the odd element.
    in_turn: Counter[int] = Counter()
    for holders, nbytes in amounts.items():
        in_turn[holders[0]] += -(-int(nbytes) // (2 * len(holders))) * 2
    assert largest <= max(in_turn.values())
    assert plan.redundancy == 1.0
