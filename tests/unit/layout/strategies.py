"""Random shapes, meshes and placements, and their meaning by enumeration with torch.chunk."""

from math import prod

import torch
from hypothesis import strategies as st

from reshard.layout.region import Region
from reshard.layout.sharding import (
    FlatShard,
    Mesh,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
)

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=5).map(tuple)


@st.composite
def meshes(draw: st.DrawFn, first: int = 0) -> Mesh:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    count = prod(shape)
    ranks = draw(st.permutations(range(first, first + count)))
    return Mesh(shape, tuple(ranks))


@st.composite
def shardings(
    draw: st.DrawFn, shape: tuple[int, ...], first: int = 0, flat: bool = True
) -> Sharding:
    mesh = draw(meshes(first))
    kinds: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
    if shape:
        dims = st.integers(0, len(shape) - 1)
        kinds += [st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 3))]
    placements = [draw(st.one_of(kinds)) for _ in mesh.shape]
    if flat and draw(st.integers(0, 5)) == 0:
        placements = [Replicate() for _ in mesh.shape]
        placements[draw(st.integers(0, len(placements) - 1))] = FlatShard()
    return Sharding(mesh, tuple(placements), shape)


def enumerate_shard(sharding: Sharding, rank: int) -> torch.Tensor:
    """The local shard of `rank`; elements are their own numbers, cut by torch.chunk."""
    local = torch.arange(prod(sharding.shape)).view(sharding.shape)
    at = sharding.mesh.coordinate(rank)
    for placement, parts, i in zip(sharding.placements, sharding.mesh.shape, at, strict=True):
        match placement:
            case Shard(dim):
                local = _chunks(local, parts, dim)[i]
            case StridedShard(dim, factor):
                local = torch.cat(
                    [_chunks(part, parts, dim)[i] for part in _chunks(local, factor, dim)], dim
                )
            case FlatShard():
                local = _chunks(local.reshape(-1), parts, 0)[i]
            case Replicate():
                pass
    return local


def _chunks(tensor: torch.Tensor, parts: int, dim: int) -> list[torch.Tensor]:
    chunks = list(tensor.chunk(parts, dim)) if tensor.shape[dim] else []
    return chunks + [tensor.narrow(dim, 0, 0)] * (parts - len(chunks))


def elements(shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]) -> list[int]:
    """The element numbers of a box, row-major."""
    whole = torch.arange(prod(shape)).view(shape)
    for dim, (start, n) in enumerate(zip(offset, extent, strict=True)):
        whole = whole.narrow(dim, start, n)
    return [int(i) for i in whole.reshape(-1)]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Any box of a tensor of `shape`, empty ones included."""
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(draw(st.integers(0, n - o)) for o, n in zip(offset, shape, strict=True))
    return Region(offset, extent)
