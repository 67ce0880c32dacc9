"""The trainer's own ranks: who they are, and one broadcast to bring them together.

Everything after that broadcast goes over the control board, so that no later step can be out of
order with the trainer's own collectives; but for factors of adapters, which a source gathers where
all ranks have just agreed to be. Not here: engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NewType

import torch
import torch.distributed as dist

from reshard.board import Deadline
from reshard.errors import DeadlineExceeded, LayoutError, ReshardError
from reshard.ids import TrainerRank

GlobalRank = NewType("GlobalRank", int)
"""Rank in torch's default process group."""


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The ranks that train one policy.

    Attributes:
        rank: this process, in `0 .. size - 1`.
        global_ranks: by trainer rank; `(0,)` where torch.distributed is not in use.
        group: the process group they share; None: the default one, or none at all.
    """

    rank: TrainerRank
    global_ranks: tuple[GlobalRank, ...]
    group: dist.ProcessGroup | None = None

    @classmethod
    def current(cls, group: dist.ProcessGroup | None = None) -> "Ensemble":
        """The ranks of `group`, or of the default group, or this process alone.

        Raises:
            ReshardError: this process is not in `group`.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(TrainerRank(0), (GlobalRank(0),))
        rank = dist.get_rank(group)
        if rank < 0:
            raise ReshardError(
                f"global rank {dist.get_rank()} is not in the group that was given; attach on the "
                "ranks that hold the policy, and there only"
            )
        ranks = dist.get_process_group_ranks(group)
        return cls(TrainerRank(rank), tuple(GlobalRank(r) for r in ranks), group)

    @property
    def size(self) -> int:
        """Number of trainer ranks."""
        return len(self.global_ranks)

    def trainer_ranks(self, global_ranks: Sequence[int]) -> tuple[int, ...]:
        """The trainer ranks of `global_ranks`.

        Raises:
            LayoutError: some of them are not in the ensemble.
        """
        strangers = sorted(set(global_ranks) - set(self.global_ranks))
        if strangers:
            raise LayoutError(
                f"global ranks {strangers} hold a part of the policy, but only "
                f"{list(self.global_ranks)} publish it; attach with the group of all of them"
            )
        at = {int(r): t for t, r in enumerate(self.global_ranks)}
        return tuple(at[r] for r in global_ranks)

    def broadcast(self, payload: bytes, deadline: Deadline) -> bytes:
        """What rank 0 gave, on every rank; other ranks' `payload` is ignored.

        Raises:
            DeadlineExceeded: not all ranks came.
        """
        if self.size == 1:
            return payload
        device = self._device()
        length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        self._broadcast(length, deadline)
        if not int(length):
            return b""
        text = bytearray(payload if self.rank == 0 else bytes(int(length)))
        carried = torch.frombuffer(text, dtype=torch.uint8).to(device)
        self._broadcast(carried, deadline)
        return bytes(carried.cpu().numpy().tobytes())

    def all_gather(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """What each rank gave, by trainer rank, on every rank.

        Raises:
            DeadlineExceeded: not all ranks came.
        """
        if self.size == 1:
            return [payload]
        device = self._device()
        own = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        lengths = [int(length) for length in self._all_gather(own, deadline)]
        if not max(lengths):
            return [b""] * self.size
        padded = bytearray(payload.ljust(max(lengths), b"\0"))
        carried = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        parts = self._all_gather(carried, deadline)
        return [
            bytes(part[:length].cpu().numpy().tobytes())
            for part, length in zip(parts, lengths, strict=True)
        ]

    def _all_gather(self, tensor: torch.Tensor, deadline: Deadline) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        work = dist.all_gather(parts, tensor, group=self.group, async_op=True)
        what = f"not all {self.size} trainer ranks came to bring merged weights up to date"
        self._wait(work, deadline, what)
        return parts

    def _broadcast(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        work = dist.broadcast(tensor, group=self.group, group_src=0, async_op=True)
        what = f"not all {self.size} trainer ranks called reshard_trainer.attach"
        self._wait(work, deadline, what)

    def _wait(self, work: dist.Work | None, deadline: Deadline, what: str) -> None:
        if work is None:
            return
        try:
            work.wait(timedelta(seconds=max(0.001, deadline.remaining())))
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"trainer rank {self.rank}: {what} within {deadline.seconds:g} s (call it on every "
                f"rank): {error}"
            ) from error

    def _device(self) -> torch.device:
        """Where the shared group moves tensors."""
        if "gloo" in str(dist.get_backend_config(self.group)):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
