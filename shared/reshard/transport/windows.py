"""gloo's way of executing a schedule: a window of messages under way, waited for in order.

Invariant: at most `in_flight` sends and as many receives are under way, and the one that is waited
for is the earliest in the order that all ranks share; so nobody waits in a circle.
"""

from collections import deque
from collections.abc import Sequence

from reshard.board import Deadline
from reshard.transport.group import RefitGroup, Work
from reshard.transport.messages import Message, prepare
from reshard.transport.places import Locate
from reshard.transport.schedule import Schedule, Transfer
from reshard.transport.timing import Timing
from reshard.transport.watch import Watch


class Windows:
    """The messages of one rank, made ready once and sent at every refit.

    Attributes:
        sends: in order.
        receives: in order.
    """

    def __init__(
        self, group: RefitGroup, schedule: Schedule, read: Locate, write: Locate, in_flight: int
    ) -> None:
        self._group = group
        self._in_flight = in_flight
        self.sends = self._prepare(schedule.sends, "sending", read)
        self.receives = self._prepare(schedule.receives, "receiving", write)

    def _prepare(self, transfers: Sequence[Transfer], action: str, locate: Locate) -> list[Message]:
        slots = [k % self._in_flight for k in range(len(transfers))]
        return prepare(transfers, slots, action, locate, self._group.staging)

    def run(self, watch: Watch, timing: Timing, deadline: Deadline, attempt: int) -> None:
        """Make all transfers.

        Raises:
            TransferFailed: a message was lost.
        """
        base = (attempt % 2**10) << 20
        receives, sends = deque(self.receives), deque(self.sends)
        arriving: deque[tuple[Message, Work]] = deque()
        leaving: deque[tuple[Message, Work]] = deque()
        while receives or sends or arriving or leaving:
            while receives and len(arriving) < self._in_flight:
                arriving.append(self._start(receives.popleft(), base))
            while sends and len(leaving) < self._in_flight:
                message = sends.popleft()
                if message.copies is not None:
                    with timing("pack"):
                        message.copies.run()
                leaving.append(self._start(message, base))
            message, work = _earlier(arriving, leaving).popleft()
            with timing("transfer"):
                message.finish(work, watch, deadline)
            if message.action == "receiving" and message.copies is not None:
                with timing("unpack"):
                    message.copies.run()

    def _start(self, message: Message, base: int) -> tuple[Message, Work]:
        begin = self._group.send if message.action == "sending" else self._group.receive
        try:
            return message, begin(message.buffer, message.peer, base + message.tag)
        except RuntimeError as error:
            raise message.failed(error) from error


def _earlier(
    one: deque[tuple[Message, Work]], other: deque[tuple[Message, Work]]
) -> deque[tuple[Message, Work]]:
    """The one whose first message comes first in the common order."""
    if not one or not other:
        return one or other
    return one if one[0][0].transfer.order < other[0][0].transfer.order else other
