"""Tiny random checkpoints in the Hugging Face format, made on the spot: no download, no hub.

Every parameter is random, norms and biases included, so that two swapped tensors of equal shape
always show. The tokenizer is one token a printable character, padded to the vocabulary's size.
"""

import string
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "qwen3_moe")

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
HIDDEN = 128
VOCAB = 256
UNEVEN_VOCAB = 250
"""Not a multiple of vLLM's padding (64), nor of 3 or 4 trainer ranks."""


def config_of(family: Family, vocab: int = VOCAB) -> PreTrainedConfig:
    """The smallest configuration of a family that vLLM's CPU attention supports (head_dim 32)."""
    common = {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    match family:
        case "llama":
            return LlamaConfig(**common, tie_word_embeddings=False)
        case "qwen2":  # attention biases, and lm_head tied to the embedding
            return Qwen2Config(**common, tie_word_embeddings=True)
        case "qwen3":
            return Qwen3Config(**common, tie_word_embeddings=False)
        case "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
            return Qwen3MoeConfig(**common, **experts, tie_word_embeddings=False)


def make_model(family: Family, *, seed: int, vocab: int = VOCAB) -> PreTrainedModel:
    """A model in fp32 whose weights depend on nothing but the arguments."""
    config = config_of(family, vocab)
    match family:
        case "llama":
            model: PreTrainedModel = LlamaForCausalLM(config)
        case "qwen2":
            model = Qwen2ForCausalLM(config)
        case "qwen3":
            model = Qwen3ForCausalLM(config)
        case "qwen3_moe":
            model = Qwen3MoeForCausalLM(config)
    randomize(model, seed)
    return model


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter new random values: norms around 1, all others around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            centre = 1.0 if "norm" in name else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(centre + 0.08 * noise)


def make_tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """One token a printable ASCII character; tokens without a character fill up the vocabulary."""
    tokens = [*SPECIAL_TOKENS, *string.printable.strip(), " "]
    tokens += [f"<unused{number}>" for number in range(len(tokens), vocab)]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def make_checkpoint(
    folder: Path,
    family: Family,
    *,
    seed: int,
    vocab: int = VOCAB,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a complete checkpoint (config, safetensors, tokenizer) into `folder` and return it."""
    model = make_model(family, seed=seed, vocab=vocab).to(dtype)
    model.save_pretrained(folder)
    make_tokenizer(vocab).save_pretrained(folder)
    return folder


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its canonical name."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
