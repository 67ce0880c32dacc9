"""One transfer, made ready: its message buffer and the copies around it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from reshard.board import Deadline
from reshard.transport.faults import TransferFailed
from reshard.transport.group import Work
from reshard.transport.packing import emptying, filling, in_place
from reshard.transport.places import CopyList, Locate
from reshard.transport.schedule import Transfer
from reshard.transport.staging import Staging
from reshard.transport.watch import Watch

_MARGIN_SECONDS = 10.0
"""A wait lasts so much longer than the deadline, at which the watch ends it in good order."""


@dataclass(frozen=True, slots=True)
class Message:
    """A transfer with its memory.

    Attributes:
        transfer: which.
        peer: the other end.
        action: `sending` or `receiving`.
        buffer: flat uint8, exactly the message: staging memory, or the weights themselves.
        copies: fill the buffer (sending) or empty it (receiving); none if it is the weights.
    """

    transfer: Transfer
    peer: int
    action: str
    buffer: torch.Tensor
    copies: CopyList | None

    @property
    def tag(self) -> int:
        """Part of the message's tag that tells buckets of a pair apart."""
        return self.transfer.number % 2**20

    def finish(self, work: Work, watch: Watch, deadline: Deadline) -> None:
        """Wait until it has arrived or left; NCCL: make the stream wait.

        Raises:
            TransferFailed: it was lost.
        """
        watch.waits_for(self.peer, self.transfer.tensors, self.action)
        try:
            if self.buffer.device.type == "cuda":
                # With a timeout it would block the host.
                work.wait()
            else:
                work.wait(timedelta(seconds=deadline.remaining() + _MARGIN_SECONDS))
        except RuntimeError as error:
            raise self.failed(error) from error
        watch.waits_no_more()

    def failed(self, error: Exception) -> TransferFailed:
        """The error of this message's wait."""
        return TransferFailed(self.peer, self.transfer.tensors, self.action, str(error))


def prepare(
    transfers: Sequence[Transfer],
    slots: Sequence[int],
    action: str,
    locate: Locate,
    staging: Staging,
) -> list[Message]:
    """Give each transfer its memory.

    Args:
        transfers: sends, or receives.
        slots: for each of them, which buffer it uses where it needs one.
        action: `sending` or `receiving`.
        locate: where its elements lie, or belong.
        staging: the buffers.
    """
    largest: dict[int, int] = {}
    staged: dict[int, int] = {}
    direct: dict[int, torch.Tensor] = {}
    for position, (transfer, slot) in enumerate(zip(transfers, slots, strict=True)):
        memory = in_place(transfer.bucket, locate)
        if memory is not None:
            direct[position] = memory
        else:
            staged[position] = slot
            largest[slot] = max(largest.get(slot, 0), transfer.bucket.nbytes)
    buffers = {slot: staging.take(action, slot, nbytes) for slot, nbytes in largest.items()}
    link = filling if action == "sending" else emptying
    messages = []
    for position, transfer in enumerate(transfers):
        peer = transfer.destination if action == "sending" else transfer.source
        if position in direct:
            messages.append(Message(transfer, peer, action, direct[position], None))
            continue
        buffer = buffers[staged[position]][: transfer.bucket.nbytes]
        copies = link(transfer.bucket, buffer, locate)
        messages.append(Message(transfer, peer, action, buffer, copies))
    return messages
