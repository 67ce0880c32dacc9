"""A trainer and an engine of two ranks in one process: real hook, board, receivers, shared memory.

Fast enough for a thousand interleavings. The engine's step loop is a lock: calls to workers run
between engine steps, as in vLLM.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from tests.multiprocess.trainer.plain_target import PlainInstaller, PlainTarget
from torch import nn

import reshard_trainer
from reshard.board import Deadline
from reshard.engine_control import EngineDescription, Message
from reshard.ids import EngineRank
from reshard.manifest import ShardManifest
from reshard.session import Install, Share, TensorSpec
from reshard_vllm.receiver import Receiver

RANKS = 2
SHAPES = {"a": (5, 3), "b": (4,), "c": (2, 6)}
CUTS = {"a": 0, "c": 1}
GATE_SECONDS = 10.0


@dataclass
class GatedTarget(PlainTarget):
    """A rank that can be slow, and that notes what it installed.

    Attributes:
        gate: while it is closed, this rank does not begin to read.
        installed: the content of each commit.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    installed: list[float] = field(default_factory=list)

    def installer(self, specs: Sequence[TensorSpec], install: Install) -> PlainInstaller:
        self.fail("describe")
        return GatedInstaller(self, specs, install)


class GatedInstaller(PlainInstaller):
    """Waits at the gate, and notes commits."""

    def begin(self) -> None:
        target = self._target
        assert isinstance(target, GatedTarget)
        target.gate.wait(GATE_SECONDS)
        super().begin()

    def commit(self) -> None:
        super().commit()
        target = self._target
        assert isinstance(target, GatedTarget)
        target.installed.append(content(target.live))


def content(tensors: Mapping[str, torch.Tensor]) -> float:
    """The version that all elements are of; NaN where they are of several."""
    values = torch.cat([tensor.detach().flatten() for tensor in tensors.values()])
    first = float(values[0])
    return first if bool((values == first).all()) else float("nan")


class LocalEngine:
    """An engine of this process. `EngineControl` says what each call promises."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.label = "default"
        self.paused = False
        self.steps = threading.Lock()
        self.targets = [GatedTarget(EngineRank(r), RANKS, SHAPES, CUTS) for r in range(RANKS)]
        for target in self.targets:
            target.gate.set()
        self.receivers = [Receiver(target) for target in self.targets]
        self._pool = ThreadPoolExecutor(RANKS)

    def describe(self, deadline: Deadline) -> EngineDescription:
        return EngineDescription(RANKS, self.label, self.paused)

    def connect(self, message: Message, deadline: Deadline) -> None:
        self._all(lambda receiver: receiver.connect(message))

    def begin(self, deadline: Deadline) -> None:
        for receiver in self.receivers:
            receiver.update_active = True

    def receive(self, message: Message, deadline: Deadline) -> None:
        self._all(lambda receiver: receiver.receive(message))

    def commit(self, message: Message, deadline: Deadline) -> None:
        with self.steps:
            self._all(lambda receiver: receiver.commit(message))

    def finish(self, version: str | None, deadline: Deadline) -> None:
        for receiver in self.receivers:
            receiver.update_active = False
        if version is not None:
            self.label = version

    def pause(self, deadline: Deadline) -> None:
        with self.steps:
            self.paused = True

    def resume(self, deadline: Deadline) -> None:
        self.paused = False

    def reset_prefix_cache(self, deadline: Deadline) -> bool:
        return True

    def weight_version(self, deadline: Deadline) -> str:
        return self.label

    def release(self, deadline: Deadline) -> None:
        self._all(lambda receiver: receiver.close())

    def close(self) -> None:
        pass

    def end(self) -> None:
        """Leave every session."""
        self._all(lambda receiver: receiver.close())
        self._pool.shutdown()

    def generate(self) -> tuple[float, str] | None:
        """One engine step: the version that it saw and its label; None while it is paused."""
        with self.steps:
            if self.paused:
                return None
            live = {f"{t.rank}/{n}": tensor for t in self.targets for n, tensor in t.live.items()}
            return content(live), self.label

    def _all(self, call: Callable[[Receiver], None]) -> None:
        list(self._pool.map(call, self.receivers))


class Policy(nn.Module):
    """Every element is the number of steps that made it."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


class Local:
    """A trainer that publishes to a local engine.

    Attributes:
        engine: it.
        hook: of the trainer.
        manifests: every state of every version, in order.
        seen: (version of the weights, label) of each engine step.
    """

    def __init__(self, share: Share, install: Install, *, overlap: bool) -> None:
        self.engine = LocalEngine(f"{share}-{install}")
        self.manifests: list[ShardManifest] = []
        self.seen: list[tuple[float, str]] = []
        self._model = Policy()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1.0)
        self._stack = ExitStack()
        self._over = threading.Event()
        self._generating = threading.Thread(target=self._generate, daemon=True)
        self.hook = reshard_trainer.attach(
            self._model,
            self._optimizer,
            [self.engine],
            deadline=GATE_SECONDS * 2,
            transport="shm",
            share=share,
            install=install,
            overlap=overlap,
            on_failure="continue",
            on_manifest=self.manifests.append,
        )

    def __enter__(self) -> Self:
        self.hook.publish()
        self._generating.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for target in self.engine.targets:
            target.gate.set()
        self._over.set()
        self._generating.join()
        self.hook.close()
        self.engine.end()

    @property
    def weights(self) -> float:
        """The version of the trainer's weights, by their values."""
        return content(dict(self._model.named_parameters()))

    def step(self) -> None:
        """One optimizer step: every element is one more."""
        for parameter in self._model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        self._optimizer.step()

    def _generate(self) -> None:
        while not self._over.wait(0.0005):
            step = self.engine.generate()
            if step is not None and (not self.seen or self.seen[-1] != step):
                self.seen.append(step)
