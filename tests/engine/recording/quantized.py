"""Tiny quantised checkpoints: random numbers under the names and shapes that each method stores."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tests.support.checkpoints import make_checkpoint

Method = Literal["awq", "gptq", "compressed-tensors", "fp8", "int4"]

_GROUP = 32
_PACK = 8

_CONFIGS: dict[Method, dict[str, Any]] = {
    "awq": {
        "quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True,
        "version": "gemm",
    },
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True,
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel",
                        "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True,
                                  "strategy": "token", "dynamic": True},
        }},
    },
    "fp8": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel",
                        "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "symmetric": True,
                                  "strategy": "token", "dynamic": True},
        }},
    },
    "int4": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                        "group_size": _GROUP, "dynamic": False},
        }},
    },
}  # fmt: skip


def make_quantized(folder: Path, method: Method) -> Path:
    """A Llama whose linear layers are stored as `method` stores them."""
    make_checkpoint(folder, "llama", seed=0, dtype=torch.bfloat16)
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if "_proj.weight" in name:
            prefix = name.removesuffix("weight")
            parts = _quantized(method, *reversed(tensor.shape))
            tensors |= {prefix + part: value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    config = folder / "config.json"
    plain = json.loads(config.read_text()) | {"quantization_config": _CONFIGS[method]}
    config.write_text(json.dumps(plain))
    return folder


def _quantized(method: Method, width: int, height: int) -> dict[str, torch.Tensor]:
    """The stored parts of a layer of `width` inputs and `height` outputs."""
    scales = torch.rand(width // _GROUP, height).to(torch.bfloat16)
    match method:
        case "awq":
            return {
                "qweight": _integers(width, height // _PACK),
                "qzeros": _integers(width // _GROUP, height // _PACK),
                "scales": scales,
            }
        case "gptq":
            return {
                "qweight": _integers(width // _PACK, height),
                "qzeros": _integers(width // _GROUP, height // _PACK),
                "scales": scales,
                "g_idx": torch.arange(width, dtype=torch.int32) // _GROUP,
            }
        case "compressed-tensors":
            return {
                "weight": torch.randint(-127, 127, (height, width), dtype=torch.int8),
                "weight_scale": torch.rand(height, 1).to(torch.bfloat16),
            }
        case "fp8":
            return {
                "weight": torch.randn(height, width).to(torch.float8_e4m3fn),
                "weight_scale": torch.rand(height, 1).to(torch.bfloat16),
            }
        case "int4":
            return {
                "weight_packed": _integers(height, width // _PACK),
                "weight_scale": torch.rand(height, width // _GROUP).to(torch.bfloat16),
                "weight_shape": torch.tensor([height, width]),
            }


def _integers(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
