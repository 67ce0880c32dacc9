"""What cannot be refitted says so, by name; and what vLLM keeps about its layers stays as it was.

One process that imports vLLM and builds models without an engine; this file is also its script.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.checkpoints import Family

pytestmark = pytest.mark.engine

_SCRIPT = Path(__file__).parent / "refusals_script.py"


@pytest.fixture(scope="module")
def said(
    checkpoints: dict[Family, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("refusals")
    done = subprocess.run(
        (sys.executable, str(_SCRIPT), str(checkpoints["llama"]), str(folder / "rendezvous")),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_names_that_the_loader_does_not_know(said: dict[str, str]) -> None:
    """T14."""
    assert "LlamaForCausalLM's loader rejects the trainer's tensors" in said["unknown name"]
    assert "layers.0.attention" in said["unknown name"]


def test_shapes_of_another_model(said: dict[str, str]) -> None:
    """T8."""
    assert "rejects the trainer's tensors" in said["wrong shape"]


def test_missing_tensors_are_counted(said: dict[str, str]) -> None:
    """T7: covered elements count, not names."""
    assert "model.layers.0.self_attn.qkv_proj.weight" in said["missing"]
    assert "8192 elements" in said["missing"]


def test_bf16_tensors_for_quantised_layers(said: dict[str, str]) -> None:
    assert said["unquantised"]


def test_quantisation_while_loading(said: dict[str, str]) -> None:
    """T6."""
    assert "quantises while it loads" in said["online"]


def test_layers_by_name_are_restored(said: dict[str, str]) -> None:
    """T18: and T4, T12: parameters, and rotary tables that models share, are the same objects."""
    assert said["layer names"] == "restored"
    assert said["rotary"] == "restored"
    assert said["parameters"] == "restored"


def test_order_of_the_checkpoint(said: dict[str, str]) -> None:
    """T13: tensors are given to the loader in the checkpoint's order, whatever the trainer's."""
    assert said["order"] == "checkpoint"


def test_different_values_for_tied_weights(said: dict[str, str]) -> None:
    """T12: the commit raises before it touches a live parameter."""
    assert "tied weights arrived with different values" in said["tied"]
    assert said["tied, live"] == "untouched"
