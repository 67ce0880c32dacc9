"""Test double of an engine rank: hand-made tensor-parallel layouts over plain torch tensors.

It stands for a vLLM worker (`reshard_vllm.target.Target`) under the real receiver. Every fault of
a phase can be asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from reshard.dtypes import DType, itemsize
from reshard.ids import FQN, EngineRank
from reshard.layout.holding import TensorLayout
from reshard.layout.region import Region
from reshard.layout.sharding import chunk
from reshard.session import ClassBytes, Install, TensorSpec
from reshard_trainer.pilot import installed_version

Phase = Literal["describe", "begin", "write", "commit"]


@dataclass
class PlainTarget:
    """A rank that cuts each tensor of `shapes` on the dim that `cuts` names (default: whole).

    Attributes:
        ignored: names that its loader skips.
        broken: phases in which this rank raises.
        broken_once: phases in which it raises the next time.
        asleep: whether it says so.
    """

    rank: EngineRank
    size: int
    shapes: Mapping[str, tuple[int, ...]]
    cuts: Mapping[str, int]
    dtype: DType = "float32"
    ignored: frozenset[str] = frozenset()
    versions: Mapping[str, str] = field(
        default_factory=lambda: {"reshard": installed_version(), "torch": str(torch.__version__)}
    )
    broken: set[Phase] = field(default_factory=set)
    broken_once: set[Phase] = field(default_factory=set)
    asleep: bool = False
    live: dict[str, torch.Tensor] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    model_name: str = "plain"

    def __post_init__(self) -> None:
        for name in self.shapes:
            self.live[name] = torch.zeros(self.region(name).shape, dtype=self.torch_dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def state(self) -> tuple[Literal["ready", "asleep"], str]:
        return ("asleep", "sleep level 2") if self.asleep else ("ready", "")

    def region(self, name: str) -> Region:
        """What this rank needs of a tensor."""
        shape = self.shapes[name]
        if name not in self.cuts:
            return Region.whole(shape)
        dim = self.cuts[name]
        start, extent = chunk(shape[dim], self.size, self.rank)
        offset = tuple(start if d == dim else 0 for d in range(len(shape)))
        return Region(offset, tuple(extent if d == dim else n for d, n in enumerate(shape)))

    def fail(self, phase: Phase) -> None:
        if phase in self.broken_once:
            self.broken_once.remove(phase)
            raise RuntimeError(f"broken once in {phase}, as asked")
        if phase in self.broken:
            raise RuntimeError(f"broken in {phase}, as asked")

    def installer(self, specs: Sequence[TensorSpec], install: Install) -> "PlainInstaller":
        self.fail("describe")
        return PlainInstaller(self, specs, install)


class PlainInstaller:
    """Receives into a shadow (staged) or the live tensors (in place)."""

    def __init__(self, target: PlainTarget, specs: Sequence[TensorSpec], install: Install) -> None:
        self._target = target
        given = {s.name: s.shape for s in specs if s.name not in target.ignored}
        wanted = target.shapes
        self.faults = [
            *(f"{n}: this model has no such tensor" for n in sorted(given.keys() - wanted.keys())),
            *(f"{n}: the trainer does not send it" for n in sorted(wanted.keys() - given.keys())),
            *(
                f"{n}: shape {given[n]} from the trainer, {wanted[n]} here"
                for n in sorted(given.keys() & wanted.keys())
                if given[n] != wanted[n]
            ),
        ]
        self._shadow = target.live
        if install == "staged":
            self._shadow = {n: torch.full_like(t, torch.nan) for n, t in target.live.items()}
        self.staging_bytes = 0
        self.notes: tuple[str, ...] = ()
        nbytes = sum(target.region(n).volume for n in wanted) * itemsize(target.dtype)
        self.classes = ClassBytes(direct=nbytes)

    def needs(self) -> tuple[TensorLayout, ...]:
        target = self._target
        return tuple(
            TensorLayout(
                FQN(name),
                shape,
                target.dtype,
                (target.region(name),) if target.region(name).volume else (),
            )
            for name, shape in sorted(target.shapes.items())
        )

    def write(
        self, name: FQN, dtype: DType, region: Region
    ) -> Sequence[tuple[Region, torch.Tensor]]:
        self._target.fail("write")
        held = self._target.region(name)
        index = tuple(
            slice(o - base, o - base + n)
            for o, base, n in zip(region.offset, held.offset, region.shape, strict=True)
        )
        return [(region, self._shadow[name][index])]

    def begin(self) -> None:
        self._target.fail("begin")

    def commit(self) -> None:
        self._target.fail("commit")
        for name, live in self._target.live.items():
            if live is not self._shadow[name]:
                live.copy_(self._shadow[name])

    def abandon(self) -> None:
        pass
