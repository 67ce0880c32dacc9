"""The checkpoint that an engine loaded, read again, a tensor at a time."""

from collections.abc import Iterator

import torch
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from reshard.dtypes import parse_dtype
from reshard.session import TensorSpec


def can_read(config: VllmConfig) -> bool:
    """Whether the engine loaded a checkpoint that can be read again."""
    return isinstance(get_model_loader(config.load_config), DefaultModelLoader)


def read(config: VllmConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole tensors, as vLLM's own loader reads them.

    Also of an engine that did not read them itself (dummy weights), where the files are there.
    """
    loader = get_model_loader(config.load_config)
    if not isinstance(loader, DefaultModelLoader):
        loader = DefaultModelLoader(LoadConfig(download_dir=config.load_config.download_dir))
    with set_current_vllm_config(config):
        yield from loader.get_all_weights(config.model_config, model)


def specs(config: VllmConfig, model: torch.nn.Module) -> tuple[TensorSpec, ...]:
    """Names, shapes and dtypes of the checkpoint, in its order."""
    return tuple(
        TensorSpec(name, tuple(tensor.shape), parse_dtype(str(tensor.dtype)))
        for name, tensor in read(config, model)
    )
