"""Moves: a sequence of millions, made as it is walked, that equals the tuple of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.ids import FQN
from reshard.layout.region import Region
from reshard.plan import Move, Moves
from reshard.plan.moves import Run

NAMES = tuple(FQN(f"layers.{i}.w") for i in range(10))
BOX = Region((0, 0), (2, 3))

runs = st.lists(
    st.tuples(st.integers(0, 10), st.integers(0, 10)).map(
        lambda pair: Run(NAMES, min(pair), max(pair), BOX, "float32", "bfloat16")
    ),
    max_size=5,
)


@given(runs)
def test_moves_are_the_tuple_of_them(some: list[Run]) -> None:
    moves = Moves(some)
    listed = tuple(
        Move(name, BOX, "float32", "bfloat16")
        for run in some
        for name in NAMES[run.first : run.last]
    )
    assert tuple(moves) == listed
    assert moves == listed
    assert hash(moves) == hash(Moves(some))
    assert len(moves) == len(listed)
    assert [moves[i] for i in range(-len(listed), len(listed))] == [*listed, *listed]
    assert moves[1:-1] == listed[1:-1]
    assert moves.nbytes == sum(move.nbytes for move in listed)


def test_moves_outside_the_sequence() -> None:
    with pytest.raises(IndexError, match="move 10 of 10"):
        Moves([Run(NAMES, 0, 10, BOX, "float32", "float32")])[10]


def test_moves_differ() -> None:
    moves = Moves([Run(NAMES, 0, 10, BOX, "float32", "float32")])
    assert moves != Moves([Run(NAMES, 0, 9, BOX, "float32", "float32")])
    assert moves != Moves([Run(NAMES, 0, 10, BOX, "float32", "bfloat16")])
    assert moves != "moves"
    assert repr(moves) == "Moves(10 moves, 240 bytes)"
