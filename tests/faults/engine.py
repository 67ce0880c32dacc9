"""An engine whose ranks can be struck, and whose memory others can read.

The live tensors lie in files that each rank maps: a judge reads them without asking anybody, also
those of a rank that was stopped or killed.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import torch
from tests.faults import strikes
from tests.faults.strikes import Kind, Strike
from tests.multiprocess.trainer.peer import Json, PeerEngine, PeerModel, serve
from tests.multiprocess.trainer.plain_target import PlainInstaller, PlainTarget
from tests.multiprocess.trainer.processes import FORKS

from reshard.ids import EngineRank
from reshard.session import Install, TensorSpec

FROZEN_SECONDS = 60.0


def live_file(folder: Path, rank: int, name: str) -> Path:
    """Where a rank's part of a tensor lies."""
    return folder / f"rank{rank}-{name}"


@dataclass
class MappedTarget(PlainTarget):
    """A rank whose live tensors are files, and whose steps are points."""

    folder: str = ""
    current: list["MappedInstaller"] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.shapes:
            shape = self.region(name).shape
            count = self.region(name).volume
            live = torch.zeros(shape, dtype=self.torch_dtype)
            if count:
                path = str(live_file(Path(self.folder), self.rank, name))
                mapped = torch.from_file(path, shared=True, size=count, dtype=self.torch_dtype)
                live = mapped.zero_().view(shape)
            self.live[name] = live

    def installer(self, specs: Sequence[TensorSpec], install: Install) -> PlainInstaller:
        if strikes.reached("describe"):
            strikes._process.corrupt_next_put = True
        self.current[:] = [MappedInstaller(self, specs, install)]
        return self.current[0]

    def spoil(self) -> None:
        """Change one element of what was received."""
        name = next(name for name, tensor in self.live.items() if tensor.numel())
        self.current[0]._shadow[name].view(-1)[0] += 0.5


class MappedInstaller(PlainInstaller):
    """Its steps are points."""

    def begin(self) -> None:
        strikes.reached("snapshot")
        super().begin()

    def commit(self) -> None:
        if strikes.reached("commit"):
            strikes._process.corrupt_next_put = True
        super().commit()


def _serve_mapped(
    pipe: Connection, rank: int, size: int, model: PeerModel, folder: str, transport: str
) -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    target = MappedTarget(
        EngineRank(rank), size, model.shapes, model.cuts, model.dtype, folder=folder
    )
    strikes.install_engine(folder, transport, target.spoil)
    serve(pipe, target)


@dataclass(frozen=True, slots=True)
class RouteStrike:
    """A fault of the engine's server at one of its routes, once.

    Attributes:
        route: its path.
        kind: `exception`: it answers 500 and does nothing; `kill`, `stop`: all ranks and the
            server, before it acts; `cut`: it acts and hangs up; `wrong`: it acts and answers junk.
    """

    route: str
    kind: Kind


class FaultyEngine(PeerEngine):
    """A server of `size` ranks that can be struck.

    Attributes:
        folder: where its memory lies, and its state as the strikes leave it.
        acted: how many control calls have been answered.
    """

    def __init__(self, model: PeerModel, size: int, folder: Path, transport: str) -> None:
        self.folder = folder
        self.acted = 0
        self._transport = transport
        self._route_strike: RouteStrike | None = None
        super().__init__(model, size)
        self._write_pids()

    def _make_process(self, pipe: Connection, rank: int) -> BaseProcess:
        arguments = (pipe, rank, self.size, self.model, str(self.folder), self._transport)
        return FORKS.Process(target=_serve_mapped, args=arguments, daemon=True)

    def _write_pids(self) -> None:
        pids = " ".join(str(process.pid) for process in self._processes.values())
        (self.folder / "pids").write_text(pids)

    def arm(self, ranks: Sequence[int], strike: Strike | None) -> None:
        """Arm these ranks, and disarm all others."""
        for rank in range(self.size):
            self.call_rank(rank, strikes.arm, strike if rank in ranks else None)

    def arm_route(self, strike: RouteStrike | None) -> None:
        """Strike at a route."""
        self._route_strike = strike

    def passes(self, rank: int, point: str) -> int:
        """How often a rank passed a point since it was armed."""
        return int(str(self.call_rank(rank, strikes.passes, point)))

    @property
    def down(self) -> bool:
        """Whether the server was killed."""
        return (self.folder / "down").exists()

    @property
    def frozen(self) -> bool:
        """Whether the server was stopped."""
        return (self.folder / "frozen").exists()

    def lost(self) -> list[int]:
        """The ranks that are dead."""
        return [rank for rank, process in self._processes.items() if not process.is_alive()]

    def thaw(self) -> None:
        """Let everything that was stopped go on."""
        for rank in range(self.size):
            if rank not in self.lost():
                self.continue_rank(rank)
        (self.folder / "frozen").unlink(missing_ok=True)

    def restart(self) -> None:
        """A new server at the old address, with new ranks that have no weights."""
        for rank, process in list(self._processes.items()):
            process.kill()
            process.join()
            self._pipes[rank].close()
        with self._lock:
            for rank in range(self.size):
                self._start_rank(rank)
        self._write_pids()
        for rank in range(self.size):
            self.passes(rank, "")  # it has started
        self.weight_version, self.paused, self.update_active = "default", False, False
        (self.folder / "down").unlink(missing_ok=True)
        (self.folder / "frozen").unlink(missing_ok=True)

    def handle(
        self, path: str, query: dict[str, list[str]], body: Json
    ) -> tuple[int, Json | bytes]:
        strike = self._route_strike
        answer: tuple[int, Json | bytes] = (0, b"")
        if strike is not None and strike.route == path:
            self._route_strike = None
            strikes.fired(self.folder).touch()
            answer = self._struck(
                strike.kind, lambda: super(FaultyEngine, self).handle(path, query, body)
            )
        elif self._answers():
            answer = super().handle(path, query, body)
        self.acted += 1
        return answer if self._answers() else (0, b"")

    def _struck(
        self, kind: Kind, act: Callable[[], tuple[int, Json | bytes]]
    ) -> tuple[int, Json | bytes]:
        match kind:
            case "exception":
                return 500, {"error": {"message": strikes.TEXT}}
            case "kill":
                (self.folder / "down").touch()
                for rank in range(self.size):
                    self.kill_rank(rank)
                return 0, b""
            case "stop":
                (self.folder / "frozen").touch()
                for rank in range(self.size):
                    self.stop_rank(rank)
                return act() if self._answers() else (0, b"")
            case "cut":
                act()
                return 0, b""
            case "wrong":
                act()
                return 200, b"\x00\xff no JSON"

    def _answers(self) -> bool:
        """Wait while the server is stopped; whether it lives."""
        until = time.monotonic() + FROZEN_SECONDS
        while self.frozen and time.monotonic() < until:
            time.sleep(0.01)
        return not self.down


State = Literal["old", "new", "torn"]
