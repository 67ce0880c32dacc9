"""Writing failures down, so that every rank names the same culprit."""

import re

import msgspec

from reshard.agreement import read_fault, report_fault
from reshard.board import Deadline
from reshard.errors import ReshardError
from reshard.session import Fault
from reshard.transport.group import RefitGroup

_BOARD_SECONDS = 2.0
_PLACE = re.compile(r"^\[[^]]*\] ")


class TransferFailed(Exception):
    """A message did not arrive or leave: the connection broke, or was closed on purpose.

    Attributes:
        peer: the other end.
        tensor: what the message holds.
        action: `sending` or `receiving`.
    """

    def __init__(self, peer: int, tensor: str, action: str, why: str) -> None:
        # gloo: "[<file>:<line>] <what happened>. This is typically caused by <advice>".
        what = _PLACE.sub("", why).partition(". This is typically")[0]
        super().__init__(what)
        self.peer = peer
        self.tensor = tensor
        self.action = action


def blame(group: RefitGroup, fault: Fault) -> Fault:
    """Write a failure down, unless another came first; the one that stands.

    Where the board does not answer any more, that is `fault` itself.
    """
    try:
        return report_fault(group.board, group.session, fault, Deadline.after(_BOARD_SECONDS))
    except ReshardError as error:
        text = f"{fault.text} (and the control board does not answer: {error})"
        return msgspec.structs.replace(fault, text=text)


def standing_fault(group: RefitGroup) -> Fault | None:
    """The fault that is on the board already, or None."""
    try:
        return read_fault(group.board, group.session, Deadline.after(0))
    except ReshardError:
        return None
