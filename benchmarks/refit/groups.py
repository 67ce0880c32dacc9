"""A gloo group over loopback, apart from all others: what the broadcast baselines send on."""

from datetime import timedelta

import torch
from torch.distributed import FileStore, ProcessGroup, ProcessGroupGloo  # type: ignore[attr-defined]

_SECONDS = 120


class GlooGroup:
    """A private group; rank 0 is its source."""

    def __init__(self, file: str, rank: int, size: int) -> None:
        """Meet the others.

        Args:
            file: path that all ranks share, not used before.
            rank: within the group.
            size: of the group.
        """
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=_SECONDS)
        store = FileStore(file, size)
        self._group = ProcessGroup(store, rank, size)
        self._group._register_backend(
            torch.device("cpu"),
            ProcessGroup.BackendType.GLOO,
            ProcessGroupGloo(store, rank, size, options),
        )

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's contiguous tensor on all ranks."""
        self._group.broadcast(tensor, 0).wait()
