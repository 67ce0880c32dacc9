"""The models that are refitted, with random weights: no download."""

from typing import Literal

import torch
from tests.support.checkpoints import config_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM

Shape = Literal["qwen2.5-0.5b", "tiny"]

_SCALE = 0.02


def config(shape: Shape) -> PreTrainedConfig:
    """The Hugging Face configuration of a shape."""
    if shape == "tiny":
        return config_of("qwen2")
    return Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def sharded_model(shape: Shape) -> nn.Module:
    """fp32 masters under FSDP2 on the default group; the same weights in every process group.

    Every parameter is random, biases and norms included, so that a stale or swapped one shows.
    """
    with torch.device("meta"):
        model: nn.Module = Qwen2ForCausalLM(config(shape))
    model.to_empty(device="cpu")
    model.tie_weights()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, _SCALE, generator=generator)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    return model


def negate(model: nn.Module) -> None:
    """Make the other of two versions out of the present one: a stale byte differs."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().neg_()  # type: ignore[attr-defined]
