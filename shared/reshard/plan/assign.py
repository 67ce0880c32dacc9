"""Assignment: demands become operations, so that every sender sends its share.

The demands on one set of holders are laid end to end, element by element, and the line is cut at
the holders' shares: each cut splits at most one tensor, and sets of one holder are never cut.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from reshard.dtypes import itemsize
from reshard.ids import GroupRank
from reshard.layout.boxes import flat_boxes
from reshard.layout.region import Region
from reshard.plan.classes import TensorClass
from reshard.plan.demands import Demand
from reshard.plan.model import TransferOp


def assign(
    index: int, tensors: TensorClass, demand: Demand, quota: "Quota"
) -> Iterator[TransferOp]:
    """The operations of one demand, sent by the holders whose turn it is.

    Args:
        index: of the class.
        tensors: the class.
        demand: the region and who needs it.
        quota: of the demand's holders; consumed.
    """
    whole = (len(demand.destinations), len(tensors.names), *demand.region.shape)
    start, count = 0, _volume(whole)
    while start < count:
        source, length = quota.take(count - start, itemsize(tensors.wire_dtype))
        # An interval of (destination, tensor, element), row-major, is a few boxes of these.
        for box in flat_boxes(whole, start, length):
            yield TransferOp(
                source,
                demand.destinations[box.offset[0] : box.end[0]],
                index,
                box.offset[1],
                box.end[1],
                Region(box.offset[2:], box.shape[2:]).translate(demand.region.offset),
            )
        start += length


def _volume(shape: tuple[int, ...]) -> int:
    return Region.whole(shape).volume


@dataclass(slots=True)
class Quota:
    """How many bytes each holder of a set still has to send; filled in rank order.

    Attributes:
        left: bytes by holder.
    """

    left: Mapping[GroupRank, int]
    _turns: list[tuple[GroupRank, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._turns = sorted(self.left.items(), reverse=True)

    def take(self, most: int, unit: int) -> tuple[GroupRank, int]:
        """The next sender, and how many elements of `unit` bytes it sends; at least 1 of `most`."""
        while True:
            rank, left = self._turns.pop()
            if not self._turns:
                # The last holder takes what rounding to whole elements has left over.
                self._turns.append((rank, left - most * unit))
                return rank, most
            units = min(most, left // unit)
            if units:
                self._turns.append((rank, left - units * unit))
                return rank, units
            # Less than an element is left: the next holder sends it.
            following, share = self._turns.pop()
            self._turns.append((following, share + left))
