"""Weights that come from a store: each rank reads the regions that it needs, and nothing is sent.

Stands in for an exchange between ranks. What is read is verified by the store's own digests, so
that neither end has to digest it again. Not here: the store's files (`reshard.store`).
"""

import time
from pathlib import Path

from reshard.board import Deadline
from reshard.errors import DeadlineExceeded
from reshard.plan import RankPlan
from reshard.session import StoredAt
from reshard.store import StoreReader
from reshard.transport.places import Locate, part, torch_dtype
from reshard.transport.report import ExchangeReport


class StoredExchange:
    """One rank's reading of one version; a rank that receives nothing reads nothing.

    Attributes:
        snapshots: True: what is stored never changes.
    """

    snapshots = True

    def __init__(self, stored: StoredAt, rank_plan: RankPlan, write: Locate) -> None:
        """Prepare; nothing is opened.

        Args:
            stored: which version, and where.
            rank_plan: what this rank receives.
            write: its places for the elements of a move.
        """
        self._stored = stored
        self._plan = rank_plan
        self._write = write

    def stage(self, deadline: Deadline, attempt: int) -> None:  # as an exchange
        """Nothing to keep: the store does."""

    def complete(
        self,
        deadline: Deadline,
        attempt: int,  # noqa: ARG002  # as an exchange
    ) -> ExchangeReport:
        """Read every region that this rank needs, in the wire dtype, into its places.

        Raises:
            StoreError: the version is gone, half written, or not what was written.
            DeadlineExceeded: it took too long; names the tensor.
        """
        received: dict[int, int] = {}
        start = time.perf_counter()
        if any(self._plan.receives.values()):
            stored = self._stored
            reader = StoreReader(Path(stored.folder), stored.version, run_id=stored.run_id)
            for peer, moves in self._plan.receives.items():
                for move in moves:
                    if deadline.expired:
                        raise DeadlineExceeded(
                            f"version {stored.version} in {stored.folder} was read up to "
                            f"{move.name} within {deadline.seconds:g} s"
                        )
                    values = reader.read(move.name, move.region).to(torch_dtype(move.wire_dtype))
                    for region, view in self._write(move):
                        view.copy_(part(values, move.region, region))
                    received[peer] = received.get(peer, 0) + move.nbytes
        return ExchangeReport(
            received_bytes=received,
            sent_bytes={},
            local_bytes=0,
            seconds={"read": time.perf_counter() - start},
            messages=0,
            direct_bytes=sum(received.values()),
            peak_extra_bytes=0,
        )

    def run(self, deadline: Deadline, attempt: int) -> ExchangeReport:
        """`stage` and `complete`."""
        self.stage(deadline, attempt)
        return self.complete(deadline, attempt)

    def close(self) -> None:
        """Nothing is open."""
