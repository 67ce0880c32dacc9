"""`reshard inspect`, as a user calls it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.support.checkpoints import Family

from reshard_vllm.inspect.command import inspect

pytestmark = pytest.mark.engine

_ENGINE = ("--dtype", "bfloat16", "--max-model-len", "128")


def test_json_on_two_ranks(checkpoints: dict[Family, Path]) -> None:
    arguments = [str(checkpoints["llama"]), "--tensor-parallel-size", "2", "--json", *_ENGINE]
    done = CliRunner().invoke(inspect, arguments)
    assert done.exit_code == 0, done.output
    said = json.loads(done.output.splitlines()[-1])
    assert said["bit_identical"] is True
    assert said["model_class"] == "LlamaForCausalLM"
    assert not said["refused"]
    assert not said["uncovered"]
    assert not said["unused"]
    everything = said["direct_bytes"] + said["repacked_bytes"] + said["computed_bytes"]
    norms = 5 * 128
    rest = 2 * 256 * 128 + 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128)
    assert everything == 2 * (rest + 2 * norms), "norms are whole on both ranks, all else is split"
    places = said["tensors"]["model.layers.0.self_attn.k_proj.weight"]
    assert [place["regions"] for place in places] == [
        [{"offset": [32 * rank, 0], "shape": [32, 128]}] for rank in (0, 1)
    ]


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    done = CliRunner().invoke(inspect, [str(tmp_path)])
    assert done.exit_code == 2
    assert "vLLM cannot build this model" in done.output
