"""Configurations and models of single ranks, loaded by vLLM itself, without an engine."""

import contextlib
from collections.abc import Generator, Iterable, Iterator

import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from reshard_vllm.inspect.messages import Request
from reshard_vllm.recording.skeleton import layer_names_restored


def config_of(request: Request, rank: int) -> VllmConfig:
    """The configuration that the engine's worker of `rank` would have."""
    arguments = EngineArgs(
        model=request.model,
        tensor_parallel_size=request.tensor_parallel,
        pipeline_parallel_size=request.pipeline_parallel,
        enable_expert_parallel=request.expert_parallel,
        enforce_eager=True,
        skip_tokenizer_init=True,
        **request.options,
    )
    config: VllmConfig = arguments.create_engine_config()
    config.parallel_config.rank = rank % config.parallel_config.world_size
    return config


def load(config: VllmConfig) -> torch.nn.Module:
    """The model with its own checkpoint, as a worker loads it."""
    return _load(config, get_model_loader(config.load_config))


def load_checkpoint(config: VllmConfig) -> torch.nn.Module:
    """The model with the checkpoint's weights, even if its engine would start on dummy ones."""
    return _load(config, DefaultModelLoader(LoadConfig()))


def load_given(config: VllmConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
    """The model as vLLM would load it from a checkpoint of these tensors."""
    return _load(config, _GivenLoader(tensors))


def _load(config: VllmConfig, loader: DefaultModelLoader) -> torch.nn.Module:
    with layer_names_restored(config), set_current_vllm_config(config), _memory_marked():
        model: torch.nn.Module = loader.load_model(
            vllm_config=config, model_config=config.model_config
        )
        return model


class _GivenLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's loader, given tensors in place of the checkpoint's."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__(LoadConfig())
        self._tensors = tensors

    def get_all_weights(
        self,
        model_config: ModelConfig,  # noqa: ARG002 (vLLM's signature)
        model: torch.nn.Module,  # noqa: ARG002
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The given tensors, in their order."""
        yield from self._tensors


@contextlib.contextmanager
def _memory_marked() -> Iterator[None]:
    """New tensors start as NaN, so that what nobody writes is equal in two models."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
