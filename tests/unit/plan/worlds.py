"""Worlds for plans: shardings on two sides, and the layouts that the ranks would report."""

from collections import defaultdict
from collections.abc import Iterable

from hypothesis import strategies as st
from tests.unit.layout.strategies import shapes, shardings

from reshard.dtypes import DType
from reshard.ids import FQN, GroupRank
from reshard.layout.holding import RankLayout, TensorLayout
from reshard.layout.sharding import Mesh, Shard, Sharding
from reshard.layout.side import SideLayout

Case = dict[str, tuple[Sharding, Sharding]]
"""Source and destination sharding by tensor name."""


def layouts(
    tensors: Iterable[tuple[str, Sharding, DType]],
) -> list[RankLayout]:
    """What each rank of the shardings reports."""
    held: dict[int, list[TensorLayout]] = defaultdict(list)
    for name, sharding, dtype in tensors:
        for rank in sharding.mesh.ranks:
            held[rank].append(
                TensorLayout(FQN(name), sharding.shape, dtype, sharding.regions(rank))
            )
    return [
        RankLayout(GroupRank(rank), tuple(sorted(parts, key=lambda t: t.name)))
        for rank, parts in held.items()
    ]


def both(
    case: Case, source: DType = "float32", wire: DType = "float32"
) -> tuple[list[RankLayout], list[RankLayout]]:
    """Both sides of a case."""
    return (
        layouts((name, s, source) for name, (s, _) in case.items()),
        layouts((name, d, wire) for name, (_, d) in case.items()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One to three tensors, each with its own shardings; the sides may share ranks."""
    count = draw(st.integers(1, 3))
    first = draw(st.sampled_from([0, 1, 64]))
    case: Case = {}
    for i in range(count):
        shape = draw(shapes)
        case[f"t{i}"] = (draw(shardings(shape)), draw(shardings(shape, first)))
    return case


def sides(
    case: Case, source: DType = "float32", wire: DType = "float32"
) -> tuple[SideLayout, SideLayout]:
    """Both sides of a case in the compact form."""
    return (
        SideLayout.from_shardings(([FQN(name)], s, source) for name, (s, _) in case.items()),
        SideLayout.from_shardings(([FQN(name)], d, wire) for name, (_, d) in case.items()),
    )


def cut(parts: int, dim: int, *, first: int = 0) -> Sharding:
    """An 8 x 8 tensor cut along `dim` over the ranks from `first`."""
    return Sharding(Mesh((parts,), tuple(range(first, first + parts))), (Shard(dim),), (8, 8))
