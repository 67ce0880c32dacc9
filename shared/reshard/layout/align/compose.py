"""Composition: "these elements are those of another tensor", followed down to a rank's storage.

An adapter says which elements of a canonical tensor are which elements of a trainer's tensor; a
rank holds some regions of the latter. `Holdings.follow` joins both. Coordinate spaces: `stored` is
global in the trainer's tensor, `canonical` global in the checkpoint's, local views are of storage.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from reshard.layout.align.views import Aligned, align
from reshard.layout.boxes import BoxIndex
from reshard.layout.pieces import Piece
from reshard.layout.view import StridedView


@dataclass(frozen=True, slots=True)
class Correspondence:
    """Element by element, two views of one shape.

    Attributes:
        stored: a view of the contiguous tensor that the trainer has.
        canonical: a view of the contiguous canonical tensor.
    """

    stored: StridedView
    canonical: StridedView


class Holdings:
    """What a rank holds of one of the trainer's tensors."""

    def __init__(self, shape: tuple[int, ...], held: Iterable[Aligned]) -> None:
        """Index it.

        Args:
            shape: of the trainer's whole tensor, in elements.
            held: each region of it that is held, and the local view that holds it.
        """
        self._shape = shape
        self._pieces = [Piece(region, "", view) for region, view in held if region.volume]
        self._regions = BoxIndex([piece.region for piece in self._pieces])

    def follow(self, shape: tuple[int, ...], same: Correspondence) -> Iterator[Aligned]:
        """The canonical regions of a correspondence that lie here, each with its local view.

        Args:
            shape: of the canonical tensor, in elements.
            same: which of its elements are which of this tensor's.

        The transpose of a [2, 3] tensor of which only the second row is held:

        >>> from reshard.layout.region import Region
        >>> second_row = (Region((1, 0), (1, 3)), StridedView(0, (1, 3), (3, 1)))
        >>> turned = Correspondence(StridedView(0, (3, 2), (1, 3)), StridedView(0, (3, 2), (2, 1)))
        >>> for region, view in Holdings((2, 3), [second_row]).follow((3, 2), turned):
        ...     print(region, view.offset, view.stride)
        [0:3, 1:2] 0 (1, 1)
        """
        for stored, canonical in align(self._shape, same.stored, same.canonical):
            there = Piece(stored, "", canonical)
            for i, common in self._regions.meeting(stored):
                local = self._pieces[i].narrow(common).view
                yield from align(shape, there.narrow(common).view, local)
