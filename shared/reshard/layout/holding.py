"""What one rank holds or needs of each canonical tensor: the input of a plan.

Coordinate space: global regions, group ranks. Not here: strides and storages, which never leave
the rank that owns them.
"""

from dataclasses import dataclass

from reshard.dtypes import DType
from reshard.ids import FQN, GroupRank
from reshard.layout.region import Region


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One rank's part of one canonical tensor.

    Attributes:
        name: canonical name.
        shape: of the whole tensor, in elements.
        dtype: of a source, the dtype that it holds; of a destination, the dtype that it wants on
            the wire (the sender casts once). A destination may list one name under two dtypes.
        regions: disjoint, sorted; what this rank holds (source) or needs (destination).
    """

    name: FQN
    shape: tuple[int, ...]
    dtype: DType
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """All that one rank holds or needs, sorted by (name, dtype).

    Attributes:
        rank: group rank: trainers first, then one engine's ranks.
        tensors: one entry a tensor (and dtype, for a destination).
    """

    rank: GroupRank
    tensors: tuple[TensorLayout, ...]
