"""What a rank's source holds, put into whole tensors by its pieces alone."""

import torch

from reshard_trainer.sources import WeightSource

Held = dict[str, torch.Tensor]

ABSENT = -12345.0
"""Where a rank holds nothing: no weight of the tests has this value."""


def read(source: WeightSource) -> Held:
    """Each canonical tensor as this rank has it, `ABSENT` elsewhere."""
    out = {}
    for held in source.layout():
        whole = torch.full(held.shape, ABSENT, dtype=getattr(torch, held.dtype))
        for region in held.regions:
            for piece in source.table.cut(held.name, region):
                ends = zip(piece.region.offset, piece.region.end, strict=True)
                whole[tuple(slice(low, high) for low, high in ends)] = source.storage(
                    piece.storage
                ).as_strided(piece.view.shape, piece.view.stride, piece.view.offset)
        out[str(held.name)] = whole
    return out


def check_cover(ranks: list[Held], expected: Held) -> None:
    """Together the ranks hold every element, each at its place; a name is on one rank at least."""
    assert sorted({name for rank in ranks for name in rank}) == sorted(expected)
    for name, whole in expected.items():
        covered = torch.zeros(whole.shape, dtype=torch.bool)
        for at, rank in enumerate(ranks):
            if name not in rank:
                continue
            assert rank[name].dtype == whole.dtype, f"{name} on rank {at}"
            held = rank[name] != ABSENT
            assert bool((rank[name] == whole)[held].all()), f"{name} on rank {at}"
            covered |= held
        assert bool(covered.all()), f"{name}: some elements are held by nobody"
