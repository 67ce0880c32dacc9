"""Meshes: grids of ranks. Coordinate space: group ranks, mesh positions. Not here: tensors."""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import prod

from reshard.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks with named axes.

    Attributes:
        shape: extent of each axis, in ranks.
        ranks: group ranks in row-major order; any order, each once.
        axes: a name for each axis.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.axes:
            object.__setattr__(self, "axes", tuple(f"axis{a}" for a in range(len(self.shape))))
        faults = []
        if any(extent < 1 for extent in self.shape):
            faults.append(f"mesh {self.shape} has an empty axis")
        if len(self.axes) != len(self.shape):
            faults.append(f"axes {self.axes} do not name the axes of mesh {self.shape}")
        if len(self.ranks) != prod(self.shape):
            faults.append(
                f"{len(self.ranks)} ranks do not fill mesh {self.shape} of {prod(self.shape)}"
            )
        if repeated := sorted(r for r, count in Counter(self.ranks).items() if count > 1):
            faults.append(f"ranks {repeated} are repeated")
        if any(r < 0 for r in self.ranks):
            faults.append(f"negative ranks in {self.ranks}")
        if faults:
            raise LayoutError("not a mesh", faults)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The position of `rank` on each axis.

        >>> Mesh((2, 2), (4, 5, 6, 7)).coordinate(6)
        (1, 0)

        Raises:
            LayoutError: `rank` is not in the mesh.
        """
        if rank not in self.ranks:
            raise LayoutError(f"rank {rank} is not in the mesh of ranks {self.ranks}")
        at = self.ranks.index(rank)
        position: list[int] = []
        for extent in reversed(self.shape):
            position.append(at % extent)
            at //= extent
        return tuple(reversed(position))

    def transposed(self, order: tuple[int, ...]) -> "Mesh":
        """The same ranks with the axes in another order: `order[i]` is the axis that becomes `i`.

        >>> Mesh((2, 3), (0, 1, 2, 3, 4, 5)).transposed((1, 0)).ranks
        (0, 3, 1, 4, 2, 5)
        """
        shape = tuple(self.shape[axis] for axis in order)
        steps = [prod(self.shape[axis + 1 :]) for axis in order]
        ranks = (
            self.ranks[sum(i * step for i, step in zip(at, steps, strict=True))]
            for at in product(*map(range, shape))
        )
        return Mesh(shape, tuple(ranks), tuple(self.axes[axis] for axis in order))
