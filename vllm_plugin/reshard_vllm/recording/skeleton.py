"""A skeleton: the engine's model once more, without data, for its loader to run on.

Built on the meta device where the constructors allow it, else on the CPU. The live model, and what
vLLM keeps about its layers by name, are left as they were.
"""

import contextlib
import logging
from collections.abc import Iterator

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names
from vllm.utils.torch_utils import set_default_torch_dtype

logger = logging.getLogger(__name__)


def build_skeleton(vllm_config: VllmConfig) -> torch.nn.Module:
    """The model of `vllm_config`, for this rank, with parameters but no weights."""
    devices = ["cpu"] if vllm_config.parallel_config.enable_expert_parallel else ["meta", "cpu"]
    for device in devices:
        try:
            return _build(vllm_config, device)
        except (NotImplementedError, RuntimeError) as error:
            if device == devices[-1]:
                raise
            logger.info("reshard: no skeleton on %s (%s), trying the CPU", device, error)
    raise AssertionError("unreachable: the last device returns or raises")


def _build(vllm_config: VllmConfig, device: str) -> torch.nn.Module:
    dtype = vllm_config.model_config.dtype
    with (
        layer_names_restored(vllm_config),
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(dtype),
        torch.device(device),
    ):
        model: torch.nn.Module = initialize_model(vllm_config)
        return model


@contextlib.contextmanager
def layer_names_restored(vllm_config: VllmConfig) -> Iterator[None]:
    """Layers register themselves by name, and refuse a name that is taken."""
    compilation = vllm_config.compilation_config
    context = dict(compilation.static_forward_context)
    experts = list(compilation.static_all_moe_layers)
    # Rotary embeddings are shared by all models of a process: a skeleton's have no data.
    rotary = dict(_ROPE_DICT)
    compilation.static_forward_context.clear()
    compilation.static_all_moe_layers.clear()
    _ROPE_DICT.clear()
    # vLLM's cache of the layers that a pipeline stage lacks is keyed by the module's id: a new
    # module can have that of one that was freed.
    _model_to_pp_missing_layer_names.clear()
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(rotary)
        compilation.static_forward_context.clear()
        compilation.static_forward_context.update(context)
        compilation.static_all_moe_layers[:] = experts
