"""Placements as text, there and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError
from reshard.layout.placements import (
    FlatShard,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    parse_placement,
)

numbers = st.integers(0, 10**6)


@given(
    st.one_of(
        st.just(Replicate()),
        st.just(FlatShard()),
        st.builds(Shard, numbers),
        st.builds(StridedShard, numbers, numbers),
    )
)
def test_what_is_written_is_read(placement: Placement) -> None:
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize("text", ["P", "Partial", "partial(sum)", "_Partial()", "P(sum)", "p"])
def test_partial_sums_are_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="each rank holds a partial sum, not elements"):
        parse_placement(text)


@pytest.mark.parametrize(
    "text", ["", "S", "S-1", "S 0", "SS0", "SS0/", "s0", "R0", "F0", "S0\n", "S٣", "Sx", "Prefix"]
)
def test_anything_else_is_unknown(text: str) -> None:
    with pytest.raises(LayoutError, match=r"unknown placement .* expected R, S<dim>, SS<dim>/"):
        parse_placement(text)
