"""Functions in real processes, one a rank, with a deadline: what they return or raise.

A fork server imports torch once, so that a rank costs a fork. Everything that was started is ended.
"""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

_ROOT = Path(__file__).parents[3]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        # What FSDP2 imports at its first use, seconds of it.
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "reshard_trainer",
        "reshard_vllm.receiver",
        "tests.support.checkpoints",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "peft",
    ]
)

Rank = Callable[..., object]


class RankFailed(AssertionError):
    """A rank raised, died or did not end."""


class Running:
    """One rank's process."""

    def __init__(self, function: Rank, arguments: Sequence[object]) -> None:
        self._reader, writer = FORKS.Pipe(duplex=False)
        self.process: BaseProcess = FORKS.Process(
            target=_run, args=(writer, function, tuple(arguments)), daemon=True
        )
        self.process.start()
        writer.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def answer(self) -> Connection:
        return self._reader

    def result(self, until: float) -> object:
        """What the function returned; raises `RankFailed`."""
        if not self._reader.poll(max(0.0, until - time.monotonic())):
            raise RankFailed(f"process {self.pid} did not end in time")
        try:
            ok, value = pickle.loads(self._reader.recv_bytes())
        except EOFError:
            self.process.join(5)
            raise RankFailed(f"process {self.pid} died: {self.process.exitcode}") from None
        if not ok:
            raise RankFailed(str(value))
        return value

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self._reader.close()


def _run(writer: Connection, function: Rank, arguments: tuple[object, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        # Not `send`: it would pass tensors as files of a process that ends.
        writer.send_bytes(pickle.dumps((True, function(*arguments))))
    except BaseException:
        writer.send_bytes(pickle.dumps((False, traceback.format_exc())))


def run_ranks(function: Rank, size: int, *arguments: object, seconds: float = 60) -> list[object]:
    """`function(rank, *arguments)` in `size` processes at once; their results by rank."""
    started = [Running(function, (rank, *arguments)) for rank in range(size)]
    until = time.monotonic() + seconds
    try:
        pending = {running.answer: running for running in started}
        results: dict[int, object] = {}
        while pending:
            ready = wait(list(pending), max(0.0, until - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(set(range(size)) - set(results))} did not end")
            for answer in ready:
                running = pending.pop(answer)  # type: ignore[call-overload]
                results[started.index(running)] = running.result(until)
        return [results[rank] for rank in range(size)]
    finally:
        for running in started:
            running.end()


def join_default_group(rank: int, size: int, folder: str) -> None:
    """Make gloo's default group, by a file in `folder`."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'rendezvous'}", rank=rank, world_size=size
    )


os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
).rstrip(os.pathsep)
