"""Post-load steps that must not run twice on the same bytes: once a refit, on what was loaded.

As vLLM's kernels of experts prepare their weights: halves swapped in place, or parameters rebound
in blocks of another rank. Oracle: a new model, loaded and prepared once.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.recording.loaders import Case, Model, same_bits
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from reshard.dtypes import parse_dtype
from reshard.session import Install, TensorSpec
from reshard_vllm.inspect.rank import write
from reshard_vllm.install.evidence import Proof
from reshard_vllm.install.installer import VllmInstaller
from reshard_vllm.install.proof import _Prover
from reshard_vllm.install.shadow import Shadow


class Method(QuantizeMethodBase):  # type: ignore[misc]
    """Counts how often it prepares; `copy.copy` shares the counter."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def create_weights(self, *_: Any, **__: Any) -> None:
        """Unused."""

    def apply(self, *_: Any, **__: Any) -> torch.Tensor:
        """Unused."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.calls.append(1)
        self.prepare(layer)

    def prepare(self, layer: nn.Module) -> None:
        raise NotImplementedError


class SwapsHalves(Method):
    """In place, at the same shape, dtype and stride: running it twice undoes it."""

    def prepare(self, layer: nn.Module) -> None:
        p = layer.get_parameter("p").data
        p.copy_(torch.cat([p[2:], p[:2]]))


class MakesBlocks(Method):
    """Rebinds to another rank, and cannot take its own result."""

    def prepare(self, layer: nn.Module) -> None:
        p = layer.get_parameter("p").data
        assert p.ndim == 2, "prepared twice"
        blocks = p.view(2, 2, 3, 2).transpose(1, 2).contiguous()
        layer.p = nn.Parameter(blocks, requires_grad=False)


class Counts(Method):
    """Gives other bytes each time."""

    def prepare(self, layer: nn.Module) -> None:
        layer.get_parameter("p").data.add_(len(self.calls))


def plain(m: Model, w: dict[str, torch.Tensor]) -> None:
    m.p.data.copy_(w["x"])
    m.q.data.copy_(w["y"])


CASE = Case(plain)
SPECS = [TensorSpec(n, s, parse_dtype("torch.float32")) for n, s in CASE.shapes.items()]


def started(method: Method, seed: int) -> Model:
    """As an engine has it: loaded, then prepared."""
    model = Model(CASE.loader)
    model.quant_method = method
    with torch.no_grad():
        model.load_weights(CASE.checkpoint(seed).items())
        method.process_weights_after_loading(model)
    return model


def config() -> Any:
    made = VllmConfig()
    made.model_config = SimpleNamespace(dtype=torch.float32, hf_text_config=SimpleNamespace())
    return made


def proven(model: Model, seed: int) -> Proof:
    recorded = CASE.recorded()
    shadow = Shadow(recorded, recorded.slots, torch.device("cpu"))
    for landing in recorded.landings.landings:
        piece = landing.piece
        box = tuple(map(slice, piece.region.offset, piece.region.end))
        shadow.place(piece.storage, piece.view).copy_(CASE.checkpoint(seed)[landing.name][box])
    return _Prover(model, config(), recorded, shadow, SPECS).from_checkpoint()


@pytest.mark.parametrize("install", ["staged", "in_place"])
@pytest.mark.parametrize("kind", [SwapsHalves, MakesBlocks])
def test_once_a_refit_on_what_was_loaded(kind: type[Method], install: Install) -> None:
    method = kind()
    model = started(method, 1)
    proof = proven(model, 1)
    assert proof.classes == {"p": "repacked", "q": "direct", "b": "direct"}
    installer = VllmInstaller(model, config(), CASE.recorded(), proof, SPECS, install=install)
    address = model.p.data_ptr()
    for seed in (2, 1, 3, 1):
        before = len(method.calls)
        # A tensor at a time, the second one first: nothing happens before the commit.
        write(installer, reversed(CASE.checkpoint(seed).items()))
        assert len(method.calls) == before + 1
        wanted = started(kind(), seed)
        assert same_bits(model.p, wanted.p)
        assert same_bits(model.q, wanted.q)
        assert model.p.data_ptr() == address


def test_a_step_that_cannot_be_repeated_is_refused_by_name() -> None:
    proof = proven(started(Counts(), 1), 1)
    assert proof.classes["p"] == "refused"
    assert "post-load step" in proof.reasons["p"]
