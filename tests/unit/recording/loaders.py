"""Models that are nothing but a loader, and the loader itself as the oracle of its recording.

What a loader does is found by running it, on real data, on real parameters; what was recorded is
carried out beside it, on shadows. Both must leave the same bits.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from reshard.dtypes import parse_dtype
from reshard.errors import RecordingError
from reshard.session import TensorSpec
from reshard_vllm.install.shadow import Shadow
from reshard_vllm.recording.loader_map import LoaderMap, owned_of, record

Tensors = Mapping[str, torch.Tensor]
Loader = Callable[["Model", dict[str, torch.Tensor]], None]


class Model(nn.Module):
    """Parameters `p`, `q`, a buffer `b`, and a loader."""

    p: nn.Parameter
    q: nn.Parameter
    b: torch.Tensor

    def __init__(self, loader: Loader, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name in ("p", "q"):
            weight = torch.zeros(4, 6, dtype=dtype)
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))
        self.register_buffer("b", torch.zeros(4, 6, dtype=dtype))
        self._loader = loader

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._loader(self, dict(weights))


@dataclass(frozen=True)
class Case:
    """One loader.

    Attributes:
        loader: what it does with the checkpoint tensors `x` and `y`.
        source: their dtype.
        target: that of the parameters.
        device: where the skeleton is built.
    """

    loader: Loader
    source: torch.dtype = torch.float32
    target: torch.dtype = torch.float32
    device: str = "meta"
    shapes: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {"x": (4, 6), "y": (4, 6)}
    )

    def skeleton(self) -> Model:
        with torch.device(self.device):
            return Model(self.loader, self.target)

    def recorded(self) -> LoaderMap:
        dtype = parse_dtype(str(self.source))
        return record(
            self.skeleton(), [TensorSpec(name, shape, dtype) for name, shape in self.shapes.items()]
        )

    def checkpoint(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(shape, generator=generator).to(self.source)
            for name, shape in self.shapes.items()
        }

    def loaded(self, checkpoint: Tensors) -> dict[str, torch.Tensor]:
        """The oracle."""
        model = Model(self.loader, self.target)
        with torch.no_grad():
            model.load_weights((name, tensor.clone()) for name, tensor in checkpoint.items())
        return dict(owned_of(model))


def carried_out(recorded: LoaderMap, checkpoint: Tensors) -> dict[str, torch.Tensor]:
    """The parameters as the recording fills them, landings in no particular order."""
    if recorded.landings.refused:
        raise RecordingError(f"refused: {recorded.landings.refused}")
    shadow = Shadow(recorded, recorded.slots, torch.device("cpu"))
    for landing in reversed(recorded.landings.landings):
        box = tuple(map(slice, landing.piece.region.offset, landing.piece.region.end))
        shadow.place(landing.piece.storage, landing.piece.view).copy_(checkpoint[landing.name][box])
    shadow.compute()
    return {
        name: shadow.tensor(slot.key) for slot in recorded.slots.values() for name in slot.names
    }


def differences(case: Case, seed: int = 1) -> list[str]:
    """Parameters that the recording fills otherwise than the loader."""
    checkpoint = case.checkpoint(seed)
    found = carried_out(case.recorded(), checkpoint)
    wanted = case.loaded(checkpoint)
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not same_bits(found[name], wanted[name])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach().contiguous(), b.detach().contiguous()
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
