"""Tiny random checkpoints of any architecture that transformers knows.

The default configuration of the class is taken, every size in it made small by its name, and the
model saved as its authors would: `save_pretrained` writes the checkpoint's own names.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file

from reshard.dtypes import parse_dtype
from reshard.session import TensorSpec
from reshard_vllm.inspect.codes import coded

Overrides = Mapping[str, Any]

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 256, "padded_vocab_size": 256, "vocab_size_per_layer_input": 256,
    "hidden_size": 128, "n_embd": 128, "d_model": 128, "embed_dim": 128, "word_embed_proj_dim": 128,
    "dim": 128, "encoder_hidden_size": 128, "out_hidden_size": 128, "projection_dim": 128,
    "lm_hidden_size": 128, "output_dim": 128, "text_hidden_size": 128, "embedding_size": 128,
    "intermediate_size": 256, "ffn_dim": 256, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256,
    "intermediate_size_mlp": 256, "ffn_hidden_size": 256, "shared_intermediate_size": 128,
    "dense_intermediate_size": 256,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "depth": 2,
    "encoder_layers": 2, "decoder_layers": 2, "text_num_hidden_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 32, "global_head_dim": 32,
    "max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512,
    "max_sequence_length": 512,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "num_shared_experts": 1,
    "n_shared_experts": 1, "moe_num_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 64, "expert_ffn_hidden_size": 64, "moe_ffn_hidden_size": 64,
    "shared_expert_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 32, "index_head_dim": 32, "index_n_heads": 4,
    "state_size": 16, "mamba_d_state": 16, "ssm_state_size": 16, "mamba_num_heads": 8,
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_head_dim": 32, "time_step_rank": 8,
    "mamba_dt_rank": 8, "n_groups": 2, "mamba_n_groups": 2, "n_mamba_heads": 8,
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "sliding_window": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8,
    "image_token_index": 5, "audio_token_id": 9, "audio_token_index": 9,
}  # fmt: skip

_PER_LAYER: Final = frozenset(
    {"layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "moe_layers",
     "attention_types", "full_attn_idxs", "mlp_only_layers", "layer_ids"}
)  # fmt: skip
"""Lists with an entry a layer: left out, so that the class makes them anew."""


_NOT_GIVEN: Final = frozenset({"transformers_version", "architectures", "torch_dtype", "dtype"})


def tiny_config(model_class: str, overrides: Overrides) -> Any:
    """The shrunk configuration of a transformers class."""
    config_class = getattr(transformers, model_class).config_class
    plain = _shrunk(config_class().to_dict())
    _merge(plain, overrides)
    return config_class(**plain)


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    small = {}
    for key, value in config.items():
        if key in _PER_LAYER or key in (
            "transformers_version",
            "architectures",
            "torch_dtype",
            "dtype",
        ):
            continue
        if isinstance(value, dict):
            small[key] = _shrunk(value)
        elif key in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            small[key] = _SIZES[key]
        else:
            small[key] = value
    return small


def _merge(config: dict[str, Any], overrides: Overrides) -> None:
    """Set values; a path into a nested configuration is written with dots."""
    for path, value in overrides.items():
        *parents, last = path.split(".")
        at = config
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value


def make_tiny(
    folder: Path,
    model_class: str,
    overrides: Overrides,
    config_edits: Overrides,
    renames: Mapping[str, str] = {},
    transposed: tuple[str, ...] = (),
) -> tuple[TensorSpec, ...]:
    """Write an index-coded checkpoint (coding 0) of a shrunk model; returns its tensors."""
    config = tiny_config(model_class, overrides)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config)
    model.save_pretrained(folder)
    path = folder / "config.json"
    plain = json.loads(path.read_text())
    _merge(plain, config_edits)
    plain.setdefault("architectures", [model_class])
    path.write_text(json.dumps(plain))
    return code_checkpoint(folder, renames, transposed)


def code_checkpoint(
    folder: Path, renames: Mapping[str, str] = {}, transposed: tuple[str, ...] = ()
) -> tuple[TensorSpec, ...]:
    """Replace every value of a checkpoint of one file by index codes."""
    path = folder / "model.safetensors"
    tensors = {_renamed(name, renames): tensor for name, tensor in load_file(path).items()}
    for name in tensors:
        if name.endswith(transposed):
            tensors[name] = tensors[name].transpose(-1, -2)
    specs = tuple(
        TensorSpec(name, tuple(tensor.shape), parse_dtype(str(tensor.dtype)))
        for name, tensor in tensors.items()
    )
    save_file(dict(coded(specs, 0)), path, metadata={"format": "pt"})
    return specs


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    for old, new in renames.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
