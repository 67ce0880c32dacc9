"""torch's rendezvous over the control board: no second port, no second secret."""

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store  # torch.distributed's own, as type checkers see it.

from reshard.board import BoardClient, Deadline
from reshard.errors import DeadlineExceeded


class BoardStore(Store):
    """A `torch.distributed.Store` whose keys lie on the board, under a prefix.

    torch's backends exchange their addresses (gloo) or their unique id (NCCL) through it, so the
    rendezvous is authenticated and encrypted; the data connections that follow are not. Every call
    ends by the deadline, whatever timeout the backend asks for.
    """

    def __init__(self, board: BoardClient, prefix: str, deadline: Deadline) -> None:
        super().__init__()
        self._board = board
        self._prefix = prefix
        self._deadline = deadline

    def set(self, key: str, value: str | bytes) -> None:
        """Put `key`."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._board.put(self._at(key), raw, self._deadline)

    def get(self, key: str) -> bytes:
        """Wait for `key`."""
        return self._board.get(self._at(key), self._deadline)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys."""
        until = self._deadline.sooner(timeout.total_seconds()) if timeout else self._deadline
        found = self._board.get_all([self._at(key) for key in keys], until)
        if found.missing:
            raise DeadlineExceeded(f"nobody put {', '.join(found.missing)} in time")

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return self._board.add(self._at(key), amount, self._deadline)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return not self._board.look([self._at(key) for key in keys], self._deadline).missing

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, once all are there."""
        self.wait(keys)
        found = self._board.look([self._at(key) for key in keys], self._deadline)
        return [found.values[self._at(key)] for key in keys]

    def _at(self, key: str) -> str:
        return f"{self._prefix}/{key}"
