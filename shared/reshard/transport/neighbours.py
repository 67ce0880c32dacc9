"""Processes of this host that take part: whether one has ended.

A rank that died where no message to or from it is under way breaks no connection that anybody
looks at. Where its process can be seen, nobody has to wait for the deadline to know.
"""

import os
import select
import weakref
from collections.abc import Collection, Mapping

import msgspec

from reshard.hosts import host_identity


class Residence(msgspec.Struct, frozen=True):
    """Where a rank runs.

    Attributes:
        host: identity of the machine (`reshard.hosts`).
        pid: process id there.
    """

    host: str
    pid: int

    @classmethod
    def own(cls) -> "Residence":
        """That of this process."""
        return cls(host_identity(), os.getpid())


class Neighbours:
    """Handles on the processes of this host, by rank.

    They are opened while every rank is known to live, so an id that is given again later does not
    mislead. A rank of another host, or one that the system gives no handle on, never counts as
    ended.
    """

    def __init__(self, residences: Mapping[int, Residence]) -> None:
        """Open a handle on each process of this host."""
        self._handles: dict[int, int] = {}
        self._closer = weakref.finalize(self, _close, self._handles)
        here = Residence.own()
        for rank, residence in residences.items():
            if residence.host == here.host and residence.pid != here.pid:
                try:
                    self._handles[rank] = os.pidfd_open(residence.pid)
                except OSError:
                    continue

    def ended(self, ranks: Collection[int]) -> set[int]:
        """Which of these ranks' processes have ended, as far as can be seen from here."""
        handles = {self._handles[rank]: rank for rank in ranks if rank in self._handles}
        poll = select.poll()
        for handle in handles:
            poll.register(handle, select.POLLIN)
        return {handles[handle] for handle, event in poll.poll(0) if event & select.POLLIN}

    def close(self) -> None:
        """Give the handles up; nobody counts as ended then. Harmless when repeated."""
        self._closer()


def _close(handles: dict[int, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])
