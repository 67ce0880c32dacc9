"""A copy of what a rank will send, so that its weights may change while a slow engine takes it.

Shared memory has a snapshot of its own; this one is for what goes over a network, and for digests.
Not here: when it is wanted (`session.py`).
"""

from collections import defaultdict
from collections.abc import Iterable

import torch

from reshard.layout.region import Region
from reshard.plan import Move
from reshard.transport.exhibits import wanted
from reshard.transport.places import CopyList, Locate, checked, part, torch_dtype


class Kept:
    """Each element that some move wants, once, in the wire dtype.

    Attributes:
        nbytes: of the copy.
    """

    def __init__(self, moves: Iterable[Move], read: Locate, device: torch.device) -> None:
        """Allocate it; `refresh` fills it.

        Args:
            moves: all that this rank sends.
            read: where it holds their elements.
            device: where the copy lies.
        """
        self.nbytes = 0
        self._copies = CopyList()
        self._tensors: dict[tuple[str, str], list[tuple[Region, torch.Tensor]]] = defaultdict(list)
        for box in wanted(moves):
            dtype = torch_dtype(box.wire_dtype)
            copy = torch.empty(box.region.shape, dtype=dtype, device=device)
            for region, source in checked(read(box), box, "source"):
                self._copies.add(part(copy, box.region, region), source, dtype)
            self._tensors[box.name, box.wire_dtype].append((box.region, copy))
            self.nbytes += box.nbytes

    def refresh(self) -> None:
        """Copy the present values."""
        self._copies.run()

    def read(self, move: Move) -> list[tuple[Region, torch.Tensor]]:
        """Where the copy holds the elements of a move."""
        found = []
        for region, copy in self._tensors[move.name, move.wire_dtype]:
            common = region.intersect(move.region)
            if common is not None and (common.volume or not move.region.volume):
                found.append((common, part(copy, region, common)))
        return found
