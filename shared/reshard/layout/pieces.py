"""Pieces: which strided view of local storage holds which region of a canonical tensor.

That one form covers DTensor shards, uneven and empty shards, flat shards, a slice of a fused
parameter, a transposed or permuted parameter, a replicated KV head, an expert.
"""

from dataclasses import dataclass

from reshard.errors import LayoutError
from reshard.layout.region import Region
from reshard.layout.view import StridedView


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """One region of a canonical tensor and the local view that holds it, dim by dim.

    Attributes:
        region: global, in elements of the canonical tensor.
        storage: the local storage's key (a parameter's name, a shadow's name).
        view: local, in elements of that storage; `view.shape == region.shape`.
    """

    region: Region
    storage: str
    view: StridedView

    def __post_init__(self) -> None:
        if self.region.shape != self.view.shape:
            raise LayoutError(f"region {self.region} is held by a view of shape {self.view.shape}")

    def narrow(self, region: Region) -> "Piece":
        """The part of this piece that holds `region`, which must lie inside it.

        >>> whole = Piece(Region((4, 0), (4, 8)), "w", StridedView.contiguous((4, 8)))
        >>> whole.narrow(Region((5, 2), (1, 3))).view
        StridedView(offset=10, shape=(1, 3), stride=(8, 1))
        """
        if self.region.intersect(region) != region and region.volume:
            raise LayoutError(f"{region} is not inside {self.region}")
        start = sum(
            (o - base) * step
            for o, base, step in zip(
                region.offset, self.region.offset, self.view.stride, strict=True
            )
        )
        view = StridedView(self.view.offset + start, region.shape, self.view.stride)
        return Piece(region, self.storage, view)
