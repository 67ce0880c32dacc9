"""Real processes for tests: forked from a server that has torch imported; always ended."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "reshard.transport.exchange"])

T = TypeVar("T")


@dataclass(frozen=True)
class Raised:
    """What a process raised."""

    kind: str
    text: str
    trace: str


def _child(pipe: Connection, function: Callable[..., object], arguments: Sequence[object]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        result: object = function(*arguments)
    except BaseException as error:
        result = Raised(type(error).__name__, str(error), traceback.format_exc())
    pipe.send(("end", result))
    pipe.close()


class Ranks:
    """Processes that run one function, each with its own arguments; a context manager."""

    def __init__(self, function: Callable[..., T], arguments: Sequence[Sequence[object]]) -> None:
        self._pipes: list[Connection] = []
        self.processes: list[ForkServerProcess] = []
        for each in arguments:
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_child, args=(theirs, function, each), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()

    def kill(self, rank: int) -> None:
        self._signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        self._signal(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        self._signal(rank, signal.SIGCONT)

    def results(self, seconds: float, ranks: Sequence[int] | None = None) -> list[Any]:
        """What the processes returned (or `Raised`), in order; fails if they do not end in time."""
        until = time.monotonic() + seconds
        results = []
        for rank in range(len(self._pipes)) if ranks is None else ranks:
            pipe = self._pipes[rank]
            if not pipe.poll(max(0.0, until - time.monotonic())):
                raise AssertionError(f"process {rank} still runs after {seconds} s")
            try:
                results.append(pipe.recv()[1])
            except EOFError:
                results.append(Raised("died", f"exit code {self._exit_code(rank)}", ""))
        return results

    def _exit_code(self, rank: int) -> int | None:
        self.processes[rank].join(5)
        return self.processes[rank].exitcode

    def _signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)


def run_ranks(
    function: Callable[..., T], arguments: Sequence[Sequence[object]], seconds: float = 60.0
) -> list[Any]:
    """Run to the end; an exception in a process fails the test with its trace."""
    with Ranks(function, arguments) as ranks:
        results = ranks.results(seconds)
    for rank, result in enumerate(results):
        if isinstance(result, Raised):
            raise AssertionError(f"process {rank}: {result.kind}: {result.text}\n{result.trace}")
    return results
