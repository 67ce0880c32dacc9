"""Constants of a loader reach the live model, in both modes, whatever the trainer sends.

Oracle: the loader itself, on a new model, given what the trainer sends.
"""

from types import SimpleNamespace

import pytest
import torch
from tests.unit.recording.loaders import Case, Model, Tensors, same_bits

from reshard.dtypes import parse_dtype
from reshard.session import Install, TensorSpec
from reshard_vllm.inspect.rank import write
from reshard_vllm.install.evidence import Proof
from reshard_vllm.install.fitting import Vocabulary
from reshard_vllm.install.installer import VllmInstaller
from reshard_vllm.install.shadow import constants_of, coverage
from reshard_vllm.recording.loader_map import owned_of, record

pytestmark = pytest.mark.parametrize("install", ["staged", "in_place"])


def missing_is_zero(model: Model, weights: dict[str, torch.Tensor]) -> None:
    """As Whisper's key biases: what the checkpoint lacks is made of zeros."""
    model.p.data.copy_(weights["x"])
    model.q.data.copy_(weights["y"] if "y" in weights else torch.zeros(4, 6))


def half_is_padding(model: Model, weights: dict[str, torch.Tensor]) -> None:
    """Beside elements that the trainer sends, in the same parameter."""
    model.p.data.copy_(weights["x"])
    model.q.data[:2].copy_(weights["x"][2:])
    if "y" in weights:
        model.q.data[2:].copy_(weights["y"][2:])
    else:
        model.q.data[2:].fill_(0.5)


def padding_first(model: Model, weights: dict[str, torch.Tensor]) -> None:
    """The constant comes first, and elements that arrive overwrite a part of it."""
    model.p.data.fill_(0.25)
    model.q.data.copy_(weights.get("y", weights["x"]))
    model.p.data[1:3].copy_(weights["x"][1:3])


def installed(case: Case, sent: Tensors, install: Install) -> tuple[Model, VllmInstaller]:
    """A model with the checkpoint's `x` and `y`, proven direct, refitted with `sent`."""
    model = Model(case.loader, case.target)
    with torch.no_grad():
        model.load_weights(case.checkpoint(1).items())
    recorded = case.recorded()
    keys = tuple(recorded.slots)
    proof = Proof(
        basis="checkpoint",
        classes=dict.fromkeys(keys, "direct"),
        reasons={},
        layers={},
        owners={},
        covered=coverage(recorded),
        constants=constants_of(recorded),
        kept={},
        copies={},
        tied={},
        order=tuple(case.shapes),
        vocabulary=Vocabulary({}, {}, tied=False),
    )
    specs = [
        TensorSpec(name, tuple(t.shape), parse_dtype(str(t.dtype))) for name, t in sent.items()
    ]
    installer = VllmInstaller(
        model,
        SimpleNamespace(),
        record(case.skeleton(), specs),
        proof,
        specs,
        install=install,
    )
    assert not installer.faults
    write(installer, sent.items())
    return model, installer


@pytest.mark.parametrize("loader", [missing_is_zero, half_is_padding, padding_first])
@pytest.mark.parametrize("names", ["x", "xy"])
def test_constants_are_written(install: Install, loader: object, names: str) -> None:
    case = Case(loader)  # type: ignore[arg-type]
    sent = {name: tensor for name, tensor in case.checkpoint(2).items() if name in names}
    model, installer = installed(case, sent, install)
    listed = "\n".join(installer.notes)
    assert ("not published: y" in listed) == (names == "x" and loader is not padding_first)
    wanted = case.loaded(sent)
    found = dict(owned_of(model))
    assert [name for name in wanted if not same_bits(found[name], wanted[name])] == []
