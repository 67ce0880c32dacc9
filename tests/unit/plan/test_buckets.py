"""Buckets: both ends cut alike, no bucket is too large, no element is lost."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.layout.strategies import elements
from tests.unit.plan.worlds import Case, both, cases, cut

from reshard.dtypes import itemsize
from reshard.errors import PlanError
from reshard.ids import FQN, GroupRank
from reshard.layout.region import Region
from reshard.plan import Move, Moves, make_plan, split_into_buckets
from reshard.plan.moves import Run


@given(cases(), st.integers(4, 64))
def test_both_ends_cut_the_same_buckets(case: Case, bucket_bytes: int) -> None:
    plan = make_plan(*both(case))
    shapes = {name: tensors.shape for tensors in plan.classes for name in tensors.names}
    for rank in plan.sent_bytes:
        for peer, moves in plan.for_rank(rank).sends.items():
            buckets = split_into_buckets(moves, bucket_bytes)
            assert buckets == split_into_buckets(plan.for_rank(peer).receives[rank], bucket_bytes)
            cut_moves = [move for bucket in buckets for move in bucket.moves]
            assert _elements(cut_moves, shapes) == _elements(list(moves), shapes)


def _elements(moves: list[Move], shapes: dict[FQN, tuple[int, ...]]) -> Counter[tuple[FQN, int]]:
    return Counter(
        (move.name, number)
        for move in moves
        for number in elements(shapes[move.name], move.region.offset, move.region.shape)
    )


mixed = st.lists(
    st.builds(
        lambda rows, columns, dtype: Move(FQN("w"), Region((3, 1), (rows, columns)), dtype, dtype),
        st.integers(1, 9),
        st.integers(1, 9),
        st.sampled_from(["float32", "bfloat16", "int8", "int64"]),
    ),
    max_size=8,
)


@given(mixed, st.integers(8, 100))
def test_moves_of_any_dtype_are_packed_aligned_without_overlap(
    moves: list[Move], bucket_bytes: int
) -> None:
    for bucket in split_into_buckets(moves, bucket_bytes):
        end = 0
        for move, offset in zip(bucket.moves, bucket.offsets, strict=True):
            assert offset >= end
            assert offset % itemsize(move.wire_dtype) == 0
            assert offset - end < itemsize(move.wire_dtype)
            end = offset + move.nbytes
        assert end == bucket.nbytes <= bucket_bytes


def test_a_tensor_larger_than_a_bucket_is_split() -> None:
    moves = Moves([Run((FQN("w"),), 0, 1, Region((0, 0), (1024, 256)), "float32", "float32")])
    buckets = split_into_buckets(moves, 1024)
    assert len(buckets) == 1024
    assert {bucket.nbytes for bucket in buckets} == {1024}


def test_a_bucket_smaller_than_an_element() -> None:
    plan = make_plan(*both({"w": (cut(2, 0), cut(2, 1, first=2))}))
    with pytest.raises(PlanError, match="a bucket of 2 bytes holds no float32"):
        split_into_buckets(plan.for_rank(GroupRank(0)).sends[GroupRank(2)], 2)
