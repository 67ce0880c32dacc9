"""Trainer ranks in real processes that do what the test says, step by step."""

import logging
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from os import kill
from types import TracebackType
from typing import Self

import torch
from tests.multiprocess.trainer.models import Kind, Tied, make_indexed, trained, wrap
from tests.multiprocess.trainer.processes import FORKS, join_default_group
from torch import nn

import reshard_trainer
from reshard.errors import ReshardError
from reshard_trainer.reports import RefitReport

STEP = 1000.0


@dataclass
class State:
    """What one trainer rank holds between commands."""

    rank: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    hook: reshard_trainer.Hook | None = None
    notes: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Said:
    """How a command ended on one rank.

    Attributes:
        error: class and text of what it raised.
        seconds: how long it took.
        version: the hook's, if there is one.
        report: the hook's last one.
        state: of the hook's manifest.
        value: what the command returned.
    """

    error: tuple[str, str] | None
    seconds: float
    version: int = -1
    report: RefitReport | None = None
    state: str = ""
    value: object = None
    faults: tuple[str, ...] = field(default=())

    @property
    def text(self) -> str:
        """Of the error, which there must be."""
        assert self.error is not None, "nothing was raised"
        return self.error[1]


Command = Callable[..., object]


def attach(state: State, engines: list[str], settings: Mapping[str, object]) -> None:
    arguments = {"deadline": 20.0, **settings}
    state.hook = reshard_trainer.attach(
        state.model,
        state.optimizer,
        engines if state.rank == 0 else [],
        **arguments,  # type: ignore[arg-type]
    )


def step(state: State) -> None:
    """Add `STEP` to every parameter."""
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, -STEP)
    state.optimizer.step()


def publish(state: State) -> None:
    assert state.hook is not None
    state.hook.publish()


def close(state: State) -> None:
    if state.hook is not None:
        state.hook.close()
        state.hook = None


def expected(steps: int) -> dict[str, torch.Tensor]:
    """Whole tensors after so many steps."""
    model = make_indexed()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(steps * STEP)
    return dict(model.state_dict())


Make = Callable[[], nn.Module]


def _serve(pipe: Connection, rank: int, size: int, kind: Kind | Make, folder: str) -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if size > 1 or kind not in ("plain",):
        join_default_group(rank, size, folder)
    model = kind() if callable(kind) else wrap(make_indexed(), kind)
    state = State(rank, model, torch.optim.SGD(trained(model), lr=1.0))
    while True:
        command, arguments = pickle.loads(pipe.recv_bytes())
        start = time.monotonic()
        error: tuple[str, str] | None = None
        faults: tuple[str, ...] = ()
        value: object = None
        try:
            value = command(state, *arguments)
        except ReshardError as raised:
            error, faults = (type(raised).__name__, str(raised)), raised.faults
        except BaseException:
            error = ("crash", traceback.format_exc())
        hook = state.hook
        said = Said(
            error=error,
            seconds=time.monotonic() - start,
            version=hook.version if hook else -1,
            report=hook.last_report if hook else None,
            state=hook.manifest.state if hook else "",
            value=value,
            faults=faults,
        )
        pipe.send_bytes(pickle.dumps(said))


class Trainers:
    """`size` trainer ranks, each with the indexed model, or its own."""

    def __init__(self, size: int, kind: Kind | Make, folder: object) -> None:
        self.size = size
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = FORKS.Pipe()
            process = FORKS.Process(
                target=_serve, args=(there, rank, size, kind, str(folder)), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def start(self, command: Command, *arguments: object, but: int | None = None) -> None:
        """Give a command to all ranks (but one); `ends` collects how it went."""
        for rank, pipe in enumerate(self._pipes):
            if rank != but:
                pipe.send_bytes(pickle.dumps((command, arguments)))

    def ends(self, *, but: int | None = None, seconds: float = 60) -> list[Said]:
        """How the command ended, by rank."""
        until = time.monotonic() + seconds
        said = []
        for rank, pipe in enumerate(self._pipes):
            if rank == but:
                continue
            if not pipe.poll(max(0.0, until - time.monotonic())):
                raise AssertionError(f"trainer rank {rank} did not end in time")
            said.append(pickle.loads(pipe.recv_bytes()))
        for each in said:
            assert each.error is None or each.error[0] != "crash", each.error
        return said

    def end_well(self) -> list[Said]:
        """How the command that was started ended, which must be well."""
        said = self.ends()
        for rank, each in enumerate(said):
            assert each.error is None, f"trainer rank {rank}: {each.error}"
        return said

    def do(self, command: Command, *arguments: object) -> list[Said]:
        """A command on all ranks, which must go well."""
        self.start(command, *arguments)
        return self.end_well()

    def fail(self, command: Command, *arguments: object) -> Said:
        """A command that must raise the same error on all ranks; rank 0's answer."""
        self.start(command, *arguments)
        said = self.ends()
        assert len({each.error for each in said}) == 1, [each.error for each in said]
        assert said[0].error is not None, "nothing was raised"
        return said[0]

    def attach(self, *engines: str, **settings: object) -> list[Said]:
        return self.do(attach, list(engines), settings)

    def fail_to_attach(self, *engines: str, **settings: object) -> Said:
        return self.fail(attach, list(engines), settings)

    def kill_rank(self, rank: int) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        kill(pid, signal.SIGKILL)


def shapes(model: nn.Module | None = None) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in (model or Tied()).state_dict().items()}
