"""torch's DTensor and FSDP2, in a fake process group, as independent oracles for placements."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.layout.strategies import elements
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from reshard.layout.sharding import (
    FlatShard,
    Mesh,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
)

GRIDS = [(1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 3), (2, 2, 2)]


@contextmanager
def fake_rank(rank: int, size: int) -> Iterator[None]:
    """This process as one rank of a group that never communicates."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def torch_placement(placement: Placement) -> TorchPlacement:
    match placement:
        case Replicate():
            return TorchReplicate()
        case Shard(dim):
            return TorchShard(dim)
        case StridedShard(dim, split_factor):
            return TorchStridedShard(dim, split_factor=split_factor)
        case FlatShard():
            raise AssertionError("DTensor has no flat shards")


def held(sharding: Sharding, rank: int) -> list[int]:
    """Element numbers of the local shard, in its order, from the pieces' views."""
    size = sum(region.volume for region in sharding.regions(rank))
    local = torch.full((max(size, 1),), -1)
    for piece in sharding.pieces(rank, "w"):
        view, region = piece.view, piece.region
        numbers = torch.tensor(elements(sharding.shape, region.offset, region.shape))
        local.as_strided(view.shape, view.stride, view.offset).copy_(numbers.view(view.shape))
    return local[:size].tolist()


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(prod(shape)).view(*shape)


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    grid = draw(st.sampled_from(GRIDS))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    kinds = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(StridedShard, dims, st.integers(2, 4)),
    )
    placements = tuple(draw(kinds) for _ in grid)
    return Sharding(Mesh(grid, tuple(draw(st.permutations(range(prod(grid)))))), placements, shape)


@given(shardings())
@settings(max_examples=60)
def test_pieces_are_dtensors_local_shards(sharding: Sharding) -> None:
    ranks = sharding.mesh.ranks
    for rank in ranks:
        with fake_rank(rank, len(ranks)):
            grid = torch.tensor(ranks).view(sharding.mesh.shape)
            tensor = distribute_tensor(
                numbered(sharding.shape),
                DeviceMesh("cpu", grid),
                [torch_placement(placement) for placement in sharding.placements],
                src_data_rank=None,
            )
            local = tensor.to_local()
            assert sharding.local_shape(rank) == tuple(local.shape)
            assert held(sharding, rank) == local.reshape(-1).tolist()


def fsdp_over_tp(
    grid: tuple[int, ...], rows: int, style: ColwiseParallel | RowwiseParallel
) -> Iterator[tuple[int, DTensor]]:
    """Each rank's shard of a linear's numbered weight, as FSDP2 over tensor parallelism has it."""
    names = ("replicate", "shard", "tp")[-len(grid) :]
    for rank in range(prod(grid)):
        with fake_rank(rank, prod(grid)):
            mesh = init_device_mesh("cpu", grid, mesh_dim_names=names)
            linear = torch.nn.Linear(4, rows, bias=False)
            with torch.no_grad():
                linear.weight.copy_(numbered((rows, 4)))
            parallelize_module(linear, mesh["tp"], style, src_data_rank=None)
            fully_shard(linear, mesh=mesh[names[:-1]])
            weight = linear.weight
            assert isinstance(weight, DTensor)
            yield rank, weight


def our_placement(placement: TorchPlacement) -> Placement:
    if isinstance(placement, TorchStridedShard):
        return StridedShard(placement.dim, int(placement.split_factor))
    if isinstance(placement, TorchShard):
        return Shard(placement.dim)
    return Replicate()


@pytest.mark.parametrize("grid", [(2, 2), (3, 2), (2, 3), (2, 2, 2)])
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("rows", [1, 4, 5, 7, 8, 10, 12])
def test_fsdp2_over_tensor_parallelism(
    grid: tuple[int, ...], style: type[ColwiseParallel | RowwiseParallel], rows: int
) -> None:
    """Uneven rows too, where the rule for the placements says something else than FSDP2 does."""
    for rank, weight in fsdp_over_tp(grid, rows, style()):
        placements = tuple(map(our_placement, weight.placements))
        sharding = Sharding(Mesh(grid, tuple(range(prod(grid)))), placements, (rows, 4))
        local = weight.to_local().reshape(-1).int().tolist()
        assert held(sharding.in_cut_order(), rank) == local


def test_the_oracle_can_fail() -> None:
    """Plain shards are other rows; and on 7 rows, 3 x 2 ranks, so is the placements' own rule."""
    mesh = Mesh((3, 2), tuple(range(6)))
    plain = Sharding(mesh, (Shard(0), Shard(0)), (8, 4))
    by_rule = Sharding(mesh, (StridedShard(0, 2), Shard(0)), (7, 4))
    for rows, wrong in ((8, plain), (7, by_rule)):
        found = {
            rank: weight.to_local().reshape(-1).int().tolist()
            for rank, weight in fsdp_over_tp((3, 2), rows, ColwiseParallel())
        }
        assert found != {rank: held(wrong, rank) for rank in range(6)}
