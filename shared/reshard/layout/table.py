"""A rank's pieces, and the question that packing asks: where does this region lie?

Coordinate space: regions are global, views are local. One table serves a trainer rank (what it
holds) or an engine rank (where it wants things); in the latter one region may have several places.
"""

from collections.abc import Iterable, Mapping

from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard.layout.boxes import BoxIndex, missing, union
from reshard.layout.pieces import Piece
from reshard.layout.region import Region


class PieceTable:
    """All pieces of one rank, by canonical name."""

    def __init__(self, pieces: Mapping[FQN, Iterable[Piece]]) -> None:
        self._tensors = {name: _Tensor(held) for name, held in pieces.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    @property
    def names(self) -> tuple[FQN, ...]:
        """Canonical names, sorted."""
        return tuple(sorted(self._tensors))

    def pieces(self, name: FQN) -> tuple[Piece, ...]:
        """The pieces of one tensor that hold elements, sorted by region.

        Raises:
            LayoutError: no such tensor.
        """
        return self._tensor(name).pieces

    def regions(self, name: FQN) -> tuple[Region, ...]:
        """Disjoint boxes that together are all that the pieces hold; sorted, merged to few.

        Raises:
            LayoutError: no such tensor.
        """
        return self._tensor(name).regions

    def cut(self, name: FQN, region: Region) -> tuple[Piece, ...]:
        """Every local place of `region`, sorted by region; several where pieces overlap.

        Raises:
            LayoutError: no such tensor, or part of the region lies nowhere.
        """
        tensor = self._tensor(name)
        found = tensor.places(region)
        if not tensor.holds_all(region):
            gap = ", ".join(map(str, missing(region, (piece.region for piece in found))))
            raise LayoutError(f"{name}: {region} lies only in part on this rank: {gap} is missing")
        return found

    def _tensor(self, name: FQN) -> "_Tensor":
        try:
            return self._tensors[name]
        except KeyError:
            raise LayoutError(f"{name}: no such tensor on this rank") from None


class _Tensor:
    """The pieces of one tensor, and the disjoint boxes that they hold."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = tuple(sorted(piece for piece in pieces if piece.region.volume))
        self.regions = union(piece.region for piece in self.pieces)
        self._by_place = BoxIndex([piece.region for piece in self.pieces])
        self._by_region = BoxIndex(self.regions)

    def places(self, region: Region) -> tuple[Piece, ...]:
        meeting = self._by_place.meeting(region)
        return tuple(
            piece if piece.region == common else piece.narrow(common)
            for piece, common in ((self.pieces[i], common) for i, common in meeting)
        )

    def holds_all(self, region: Region) -> bool:
        held = sum(common.volume for _, common in self._by_region.meeting(region))
        return held == region.volume
