"""How much memory an exchange may take beside the weights, and what follows from that.

Units: bytes. The same on all ranks, so that they cut the same messages and choose the same ways.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.ids import GroupRank
from reshard.session import Share
from reshard.transport.casting import LEAST_ELEMENTS, SCRATCH_BYTES

IN_FLIGHT = 4
"""Messages under way at one time, each way."""

LEAST_BUFFER_BYTES = 1024
"""Of a bound: enough for a message of a few elements in every buffer."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound on the tensors of one rank's exchange; bookkeeping is not counted.

    Attributes:
        nbytes: at most so many; None: as it comes.
        sent_bytes: by group rank: what it sends, as the plan says.
    """

    nbytes: int | None
    sent_bytes: Mapping[GroupRank, int]

    def bucket_bytes(self, wanted: int, backend: str) -> int:
        """The largest message, at most `wanted`, such that all buffers stay within the bound."""
        if self.nbytes is None:
            return wanted
        # Sends and receives; NCCL has two sets; one more for a value that is rounded on its way.
        buffers = 2 * IN_FLIGHT * (2 if backend == "nccl" else 1) + 1
        if self.nbytes >= 2 * SCRATCH_BYTES:
            return min(wanted, (self.nbytes - SCRATCH_BYTES) // buffers)
        # Too small for a scratch buffer: so are then the messages.
        return min(wanted, self.nbytes // buffers, LEAST_ELEMENTS - 1)

    def allows_showing(self, sender: int, share: Share) -> bool:
        """Whether a sender may show its weights in shared memory."""
        if self.nbytes is None:
            return True
        snapshot = 0 if share == "live" else self.sent_bytes.get(GroupRank(sender), 0)
        return max(snapshot, SCRATCH_BYTES) <= self.nbytes


UNBOUNDED = Bound(None, {})
