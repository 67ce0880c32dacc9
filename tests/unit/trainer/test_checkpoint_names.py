"""transformers models in memory against the files that `save_pretrained` writes, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tests.multiprocess.trainer.reading import read
from tests.support.checkpoints import checkpoint_tensors, make_model, randomize
from transformers import PreTrainedModel

from reshard_trainer.ensemble import Ensemble
from reshard_trainer.sources import ModuleSource

_SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _tied() -> PreTrainedModel:
    return make_model("qwen2", seed=1)


def _qwen3_moe() -> PreTrainedModel:
    return make_model("qwen3_moe", seed=1)


def _mixtral() -> PreTrainedModel:
    config = transformers.MixtralConfig(**_SMALL, num_local_experts=3)
    return transformers.MixtralForCausalLM(config)


def _gpt_oss() -> PreTrainedModel:
    """Experts [E, H, 2I], gate and up interleaved, with biases, in the checkpoint too."""
    config = transformers.GptOssConfig(**_SMALL, num_local_experts=3, num_experts_per_tok=2)
    return transformers.GptOssForCausalLM(config)


def _llava() -> PreTrainedModel:
    """In memory `model.language_model`, in its checkpoints `language_model.model`."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    text = transformers.LlamaConfig(**_SMALL)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=31)
    )


MAKES: list[Callable[[], PreTrainedModel]] = [_tied, _qwen3_moe, _mixtral, _gpt_oss, _llava]


@pytest.fixture(params=MAKES, ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made: PreTrainedModel = request.param()
    randomize(made, 3)
    return made


def _check(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    saved = checkpoint_tensors(folder)
    held = read(ModuleSource(model, Ensemble.current()))
    for name, tensor in saved.items():
        assert torch.equal(held[name], tensor), name
    tied = {n for n in held.keys() - saved.keys() if "lm_head" not in n and "embed" not in n}
    assert not tied, "names that no checkpoint has"


def test_names_and_tensors_are_those_of_the_checkpoint(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    _check(model, tmp_path)


def test_also_after_loading(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "first")
    loaded = type(model).from_pretrained(tmp_path / "first")

    _check(loaded, tmp_path / "second")


def test_a_vision_language_model_gets_its_own_prefixes(tmp_path: Path) -> None:
    made = _llava()
    assert "model.language_model.layers.0.input_layernorm.weight" in made.state_dict()

    held = read(ModuleSource(made, Ensemble.current()))

    assert "language_model.model.layers.0.input_layernorm.weight" in held
    assert "model.language_model.layers.0.input_layernorm.weight" not in held


def test_experts_are_views_of_the_model_itself() -> None:
    made = _qwen3_moe()
    source = ModuleSource(made, Ensemble.current())

    fused = dict(made.named_parameters())["model.layers.0.mlp.experts.gate_up_proj"]
    (piece,) = source.table.pieces("model.layers.0.mlp.experts.2.up_proj.weight")  # type: ignore[arg-type]
    assert source.storage(piece.storage).data_ptr() == fused.data_ptr()


def test_names_in_memory_where_they_are_asked_for() -> None:
    made = _qwen3_moe()
    source = ModuleSource(made, Ensemble.current(), adapter=None)

    assert [tensor.name for tensor in source.layout()] == sorted(made.state_dict())
