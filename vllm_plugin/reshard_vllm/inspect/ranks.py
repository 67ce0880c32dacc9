"""Rank processes: a whole engine's ranks, without an engine, for one model after the other."""

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from reshard.errors import EngineError
from reshard_vllm.inspect.messages import RankReport, Request

_ENVIRONMENT: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
    "TQDM_DISABLE": "1",
}
"""Two ranks on few cores, quietly; whatever the caller's environment says comes first."""


class RankPool:
    """`size` processes, each with one rank.

    A process that dies (a crash in a kernel) or misses a deadline ends the pool. `worker` is the
    module that each process runs.
    """

    def __init__(
        self,
        size: int,
        *,
        log: Path,
        environment: Mapping[str, str] = {},
        worker: str = "reshard_vllm.inspect.worker",
    ) -> None:
        self.size = size
        self._log = log
        self._folder = tempfile.TemporaryDirectory(prefix="reshard-ranks-")
        rendezvous = Path(self._folder.name, "rendezvous")
        identity = {"VLLM_DIST_IDENT": rendezvous.parent.name}
        self._ranks = [
            _Rank((worker, str(rank), str(size), str(rendezvous)), log, {**identity, **environment})
            for rank in range(size)
        ]

    def run(self, request: Request, seconds: float) -> tuple[RankReport, ...]:
        """One report a rank.

        Raises:
            EngineError: a process died, or did not answer in time; the pool is closed.
        """
        deadline = time.monotonic() + seconds
        try:
            for rank in self._ranks:
                rank.send(request)
            return tuple(rank.receive(deadline) for rank in self._ranks)
        except EngineError:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Rank:
    """One process and its two pipes."""

    def __init__(self, worker: tuple[str, ...], log: Path, environment: Mapping[str, str]) -> None:
        self._rank, self._log = worker[1], log
        source, self._requests = os.pipe()
        self._reports, sink = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                (sys.executable, "-m", *worker, str(source), str(sink)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**_ENVIRONMENT, **os.environ, **environment},
                pass_fds=(source, sink),
            )
        os.close(source)
        os.close(sink)
        self._pending = b""

    def send(self, request: Request) -> None:
        """Start an inspection."""
        try:
            os.write(self._requests, msgspec.json.encode(request) + b"\n")
        except BrokenPipeError:
            raise self._failure("has ended") from None

    def receive(self, deadline: float) -> RankReport:
        """Wait for its report."""
        while b"\n" not in self._pending:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._reports], [], [], left)[0]:
                raise self._failure("has not answered in time")
            received = os.read(self._reports, 1 << 20)
            if not received:
                raise self._failure("has died")
            self._pending += received
        line, _, self._pending = self._pending.partition(b"\n")
        return msgspec.json.decode(line, type=RankReport)

    def close(self) -> None:
        """End the process."""
        if self._process.returncode is not None:
            return
        os.close(self._requests)
        os.close(self._reports)
        self._process.kill()
        self._process.wait()

    def _failure(self, what: str) -> EngineError:
        status = self._process.poll()
        ended = "" if status is None else f" (status {status})"
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return EngineError(f"the process of rank {self._rank} {what}{ended}; its log ends:\n{tail}")
