"""Shardings against enumeration by torch.chunk, and against torch's own DTensor."""

import warnings
from collections.abc import Iterator
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.layout.strategies import elements, enumerate_shard, shapes, shardings

from reshard.errors import LayoutError
from reshard.layout.region import Region
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


@pytest.fixture(scope="module")
def fake_world() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(8, 4), (10, 3), (7, 5), (1, 9), (3,), (2, 3, 5)])
@pytest.mark.parametrize("grid", [(8,), (2, 4), (4, 2), (2, 2, 2)])
def test_regions_are_those_of_dtensor(
    fake_world: None, shape: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    """torch's own arithmetic of local shapes and offsets, for every mesh position."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_mesh = DeviceMesh("cpu", torch.arange(8).view(grid), _init_backend=False)
    mesh = Mesh(grid, tuple(range(8)))
    for first in range(-1, len(shape)):
        for last in range(-1, len(shape)):
            dims = [first, *[-1] * (len(grid) - 2), last][-len(grid) :]
            theirs = [TorchReplicate() if d < 0 else TorchShard(d) for d in dims]
            ours = tuple(Replicate() if d < 0 else Shard(d) for d in dims)
            sharding = Sharding(mesh, ours, shape)
            for rank in range(8):
                local, offset = _compute_local_shape_and_global_offset(
                    shape, torch_mesh.shape, mesh.coordinate(rank).__getitem__, theirs
                )
                regions = sharding.regions(rank)
                if prod(local):
                    assert regions == (Region(tuple(offset), tuple(local)),)
                else:
                    assert not regions


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
