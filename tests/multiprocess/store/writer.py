"""Writes version after version into a store, until it is killed; says which it has begun."""

import sys
from pathlib import Path

import torch

from reshard.ids import FQN, GroupRank
from reshard.layout.holding import RankLayout, TensorLayout
from reshard.layout.region import Region
from reshard.store import retire, seal, write_shard

SHAPE = (1024, 1024)


def values(version: int) -> torch.Tensor:
    """What a version holds."""
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + version


def main() -> None:
    root = Path(sys.argv[1])
    layout = RankLayout(
        GroupRank(0), (TensorLayout(FQN("w"), SHAPE, "float32", (Region.whole(SHAPE),)),)
    )
    for version in range(1, 10_000):
        whole = values(version)
        print(version, flush=True)
        write_shard(root, "run", version, layout, lambda _, region, whole=whole: whole)  # type: ignore[misc]
        seal(root, "run", version, 1)
        retire(root, keep=2)


if __name__ == "__main__":
    main()
