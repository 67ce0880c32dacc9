"""Shardings against enumeration by torch.chunk."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.layout.strategies import elements, enumerate_shard, shapes, shardings

from reshard.errors import LayoutError
from reshard.layout.sharding import FlatShard, Mesh, Replicate, Shard, Sharding, StridedShard


@given(shapes, st.data())
def test_pieces_are_the_elements_of_the_enumerated_shard(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    sharding = data.draw(shardings(shape))
    for rank in sharding.mesh.ranks:
        expected = enumerate_shard(sharding, rank)
        held: dict[int, int] = {}
        for piece in sharding.pieces(rank, "w"):
            view = piece.view
            numbers = elements(shape, piece.region.offset, piece.region.shape)
            places = torch.arange(max(1, expected.numel())).as_strided(
                view.shape, view.stride, view.offset
            )
            held |= dict(zip((int(p) for p in places.reshape(-1)), numbers, strict=True))
        assert [held[i] for i in range(expected.numel())] == expected.reshape(-1).tolist()
        assert len(held) == expected.numel()
        assert sharding.local_shape(rank) == tuple(expected.shape)
        assert sharding.regions(rank) == tuple(p.region for p in sharding.pieces(rank, "w"))


@given(shapes, st.data())
def test_ranks_together_hold_every_element(shape: tuple[int, ...], data: st.DataObject) -> None:
    sharding = data.draw(shardings(shape))
    held = {
        number
        for rank in sharding.mesh.ranks
        for region in sharding.regions(rank)
        for number in elements(shape, region.offset, region.shape)
    }
    assert held == set(range(prod(shape)))


def test_the_enumeration_can_fail() -> None:
    """Reading FSDP-over-TP as plain shards gives other rows: the oracle tells them apart."""
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    strided = Sharding(mesh, (StridedShard(0, 2), Shard(0)), (8, 4))
    plain = Sharding(mesh, (Shard(0), Shard(0)), (8, 4))
    assert not torch.equal(enumerate_shard(strided, 1), enumerate_shard(plain, 1))
    assert strided.regions(1) != plain.regions(1)


def test_fsdp_over_tp_rows_by_hand() -> None:
    """dp 2 x tp 2, 8 rows: tp cuts first (0-3 | 4-7), then dp cuts each half."""
    sharding = Sharding(Mesh((2, 2), (0, 1, 2, 3)), (StridedShard(0, 2), Shard(0)), (8, 4))
    rows = [[r.offset[0] + i for r in sharding.regions(k) for i in range(r.shape[0])]
            for k in range(4)]  # fmt: skip
    assert rows == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_flat_shards_are_few_boxes() -> None:
    sharding = Sharding(Mesh((3,), (0, 1, 2)), (FlatShard(),), (4, 5, 6))
    for rank in range(3):
        assert len(sharding.regions(rank)) <= 2 * 3 - 1


def test_every_fault_is_named() -> None:
    with pytest.raises(LayoutError) as caught:
        Sharding(Mesh((2, 2), (0, 1, 2, 3)), (Shard(3), StridedShard(0, 0), Shard(0)), (4, 4))
    assert caught.value.faults == (
        "3 placements for a mesh of 2 axes",
        "placement S3 shards dim 3 of a 2-d tensor",
        "placement SS0/0 has split factor 0",
    )


def test_meshes_that_are_none() -> None:
    with pytest.raises(LayoutError) as caught:
        Mesh((2, 2), (0, 1, 1, -1, 4))
    assert caught.value.faults == (
        "5 ranks do not fill mesh (2, 2) of 4",
        "ranks [1] are repeated",
        "negative ranks in (0, 1, 1, -1, 4)",
    )


def test_flat_and_cut_do_not_mix() -> None:
    with pytest.raises(LayoutError, match="a flat shard cannot be combined"):
        Sharding(Mesh((2, 2), (0, 1, 2, 3)), (FlatShard(), Shard(0)), (4, 4))


def test_a_rank_outside_the_mesh() -> None:
    with pytest.raises(LayoutError, match=r"rank 9 is not in the mesh of ranks \(0, 1\)"):
        Sharding(Mesh((2,), (0, 1)), (Shard(0),), (4,)).regions(9)


def test_the_order_of_cuts_is_that_of_the_placements_on_even_sizes() -> None:
    mesh = Mesh((2, 2, 2), (7, 6, 5, 4, 3, 2, 1, 0))
    for placements in (
        (StridedShard(0, 4), StridedShard(0, 2), Shard(0)),
        (StridedShard(0, 2), StridedShard(0, 2), Shard(0)),
        (Shard(0), StridedShard(0, 2), Shard(0)),
        (Replicate(), StridedShard(0, 2), Shard(0)),
        (StridedShard(0, 2), Shard(1), Shard(0)),
        (Shard(1), Shard(0), Replicate()),
    ):
        sharding = Sharding(mesh, placements, (16, 4))
        cut = sharding.in_cut_order()
        assert not any(isinstance(p, StridedShard) for p in cut.placements)
        assert all(cut.regions(rank) == sharding.regions(rank) for rank in range(8))


def test_a_split_factor_that_no_axes_make() -> None:
    sharding = Sharding(Mesh((2, 2), (0, 1, 2, 3)), (StridedShard(0, 3), Shard(0)), (8,))
    with pytest.raises(LayoutError) as caught:
        sharding.in_cut_order()
    assert str(caught.value) == (
        "placement SS0/3 on axis axis0 was not made by cutting after other axes: those to its "
        "right cut dim 0 into 2 parts"
    )


def test_a_mesh_with_an_empty_axis_and_too_few_names() -> None:
    with pytest.raises(LayoutError) as caught:
        Mesh((2, 0), (), ("only",))
    assert caught.value.faults == (
        "mesh (2, 0) has an empty axis",
        "axes ('only',) do not name the axes of mesh (2, 0)",
    )


def test_a_placement_of_another_kind() -> None:
    with pytest.raises(LayoutError, match="is none of Replicate, Shard, StridedShard, FlatShard"):
        Sharding(Mesh((2,), (0, 1)), ("Partial(sum)",), (4,))  # type: ignore[arg-type]


def test_seven_rows_over_four_ranks_by_hand() -> None:
    bias = Sharding(Mesh((4,), (0, 1, 2, 3)), (Shard(0),), (7,))
    assert [bias.local_shape(rank) for rank in range(4)] == [(2,), (2,), (2,), (1,)]
    two_rows = Sharding(Mesh((4,), (0, 1, 2, 3)), (Shard(0),), (2, 5))
    assert [bool(two_rows.regions(rank)) for rank in range(4)] == [True, True, False, False]


def test_a_strided_shard_lies_densely_in_its_local_shard() -> None:
    """Rows 0-1 and 4-5 of the tensor are rows 0-1 and 2-3 of the shard."""
    sharding = Sharding(Mesh((2,), (0, 1)), (StridedShard(0, 2),), (8, 3))
    assert [(str(p.region), p.view.offset) for p in sharding.pieces(0, "w")] == [
        ("[0:2, 0:3]", 0),
        ("[4:6, 0:3]", 6),
    ]
