"""Shapes of models against transformers, which builds them from their configurations."""

import re
from collections.abc import Mapping

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedConfig, Qwen3Config

from reshard.errors import LayoutError
from reshard.simulation.models import MODELS, model
from reshard.simulation.parallelism import Parallelism, parse_parallelism

QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
)


def built(config: PreTrainedConfig) -> Mapping[str, tuple[int, ...]]:
    """Shapes by name, layers made alike."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    return {
        re.sub(r"\.\d+\.", ".{layer}.", name): tuple(value.shape)
        for name, value in module.state_dict().items()
    }


def described(name: str) -> Mapping[str, tuple[int, ...]]:
    return {family.template: family.shape for family in model(name).families}


def test_a_dense_model_is_as_transformers_builds_it() -> None:
    assert described("qwen3-8b") == built(QWEN3_8B)


def test_deepseek_v3_is_as_transformers_builds_it() -> None:
    found = dict(built(DeepseekV3Config(num_hidden_layers=4)))
    # transformers stacks the experts; a checkpoint has one tensor each.
    gate_up = found.pop("model.layers.{layer}.mlp.experts.gate_up_proj")
    down = found.pop("model.layers.{layer}.mlp.experts.down_proj")
    ours = dict(described("deepseek-v3"))
    expert = "model.layers.{layer}.mlp.experts.{expert}."
    gate, up = (ours.pop(f"{expert}{part}_proj.weight") for part in ("gate", "up"))
    assert gate == up
    assert gate_up == (256, 2 * gate[0], gate[1])
    assert down == (256, *ours.pop(f"{expert}down_proj.weight"))
    assert ours == found


def test_published_sizes() -> None:
    sizes = {name: round(model(name).elements / 1e9, 1) for name in MODELS}
    assert sizes == {
        "deepseek-v3": 671.0,
        "glm-4.5-air": 106.9,
        "kimi-k2": 1026.4,
        "llama-70b": 70.6,
        "qwen3-8b": 8.2,
        "qwen3-30b-a3b": 30.5,
        "qwen3-235b-a22b": 235.1,
    }
    # https://github.com/vllm-project/vllm/pull/43375 counts 36945 names.
    assert model("qwen3-235b-a22b").tensors == 36945


def test_no_such_model() -> None:
    with pytest.raises(LayoutError, match="unknown model 'gpt-2'; known: deepseek-v3"):
        model("gpt-2")


@pytest.mark.parametrize("text", ["", "tp", "tp=8,tp=4", "xp=2", "tp=-1", "tp=8;dp=2"])
def test_malformed_parallelism(text: str) -> None:
    with pytest.raises(LayoutError, match="expected each of tp, fsdp, dp, pp, ep, etp"):
        parse_parallelism(text)


def test_degrees_that_do_not_fit() -> None:
    with pytest.raises(LayoutError, match="ep=3 x etp=1 does not divide the 8 ranks"):
        parse_parallelism("tp=8,ep=3")
    with pytest.raises(LayoutError, match="tp=0: at least 1"):
        Parallelism(tp=0)


def test_a_parallelism_reads_back() -> None:
    for text in ("tp=4,dp=32,ep=32,etp=4", "tp=1", "fsdp=256,ep=32"):
        assert str(parse_parallelism(text)) == text
