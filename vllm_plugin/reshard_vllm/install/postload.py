"""vLLM's post-load steps, run again.

After loading, vLLM lets every layer turn its parameters into what its kernels want: tiles, swizzled
halves, handlers that hold a packed copy, or nothing. A refit repeats that step, once, on parameters
in load layout, and puts the result back into the live parameters, whose addresses stay.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from reshard.errors import RecordingError
from reshard_vllm.install.handlers import held_by, keep, put_back

_ONCE_FLAG = "_already_called_process_weights_after_loading"


@dataclass(frozen=True, slots=True)
class Layer:
    """A module with a post-load step.

    Attributes:
        name: qualified name in the model.
        module: the live module.
        deferred: whether the step belongs to an attention layer, and runs after all others.
    """

    name: str
    module: torch.nn.Module
    deferred: bool

    def parameter_name(self, local: str) -> str:
        """Qualified name of one of the module's own parameters or buffers."""
        return f"{self.name}.{local}" if self.name else local


def layers_of(model: torch.nn.Module) -> Iterator[Layer]:
    """Every module with a post-load step, in vLLM's order."""
    deferred = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and _has_step(type(method)):
            yield Layer(name, module, deferred=False)
        if is_deferred_attention_layer(module):
            deferred.append(Layer(name, module, deferred=True))
    yield from deferred


def keeps_nothing(layer: Layer) -> bool:
    """Whether the step has left nothing beside the parameters that could depend on their values.

    Only of methods whose step does no more than choose a kernel, and pack what that wants. Where no
    kernel fits, vLLM finds that out anew each time, a millisecond a layer.
    """
    method = type(getattr(layer.module, "quant_method", None))
    known = method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return known and not _plain_tensors(layer.module) and not held_by(layer.module)


def _has_step(method: type) -> bool:
    base = QuantizeMethodBase.process_weights_after_loading
    return getattr(method, "process_weights_after_loading", base) is not base


@dataclass(frozen=True, slots=True)
class Result:
    """What a post-load step made of given parameters.

    Attributes:
        parameters: by local name.
        tensors: plain tensor attributes of the module, by local name.
    """

    parameters: Mapping[str, torch.Tensor]
    tensors: Mapping[str, torch.Tensor]


def rehearse(layer: Layer, config: VllmConfig, loaded: Mapping[str, torch.Tensor]) -> Result:
    """Run the step on `loaded` (parameters in load layout, by local name), leaving no trace.

    The module's attributes and the contents of its tensors are put back; helper objects that it
    shares with others are assumed to be changed by the step to what they were.
    """
    with rehearsed(layer, config, loaded):
        return Result(
            {n: p.detach() for n, p in layer.module._parameters.items() if p is not None},
            {n: t.clone() for n, t in _plain_tensors(layer.module).items()},
        )


@contextlib.contextmanager
def rehearsed(
    layer: Layer, config: VllmConfig, loaded: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """The layer as the step makes it of copies of `loaded`; put back on leaving."""
    attributes = dict(layer.module.__dict__)
    parameters, buffers = dict(layer.module._parameters), dict(layer.module._buffers)
    # Small: scales and packed biases. Parameters are replaced by copies of `loaded`, never written.
    kept = [
        (t, t.clone())
        for t in (*_plain_tensors(layer.module).values(), *buffers.values())
        if t is not None and not t.is_meta
    ]
    held = held_by(layer.module)
    try:
        _step(layer, config, {n: t.clone() for n, t in loaded.items()})
        yield
    finally:
        layer.module.__dict__.clear()
        layer.module.__dict__.update(attributes)
        layer.module.__dict__["_parameters"] = parameters
        layer.module.__dict__["_buffers"] = buffers
        put_back(held)
        for tensor, contents in kept:
            tensor.copy_(contents)


def rerun(layer: Layer, config: VllmConfig, loaded: Mapping[str, torch.Tensor]) -> None:
    """Run the step on `loaded`, and move its result into the live parameters, which stay in place.

    Raises:
        RecordingError: the result does not fit the live parameters.
    """
    module = layer.module
    live = dict(module._parameters)
    tensors = _plain_tensors(module)
    held = held_by(module)
    _step(layer, config, loaded)
    keep(held)
    made = dict(module._parameters)
    module._parameters.clear()
    module._parameters.update(live)
    for name, parameter in live.items():
        result = made.get(name)
        if parameter is not None and result is not None and result is not parameter:
            _put_back(layer.parameter_name(name), parameter.data, result.detach())
    for name, tensor in tensors.items():
        fresh = module.__dict__.get(name)
        if isinstance(fresh, torch.Tensor) and fresh is not tensor and fresh.shape == tensor.shape:
            if fresh.dtype == tensor.dtype and fresh.data_ptr() != tensor.data_ptr():
                tensor.copy_(fresh)
            module.__dict__[name] = tensor


def _step(layer: Layer, config: VllmConfig, loaded: Mapping[str, torch.Tensor]) -> None:
    module = layer.module
    for name, tensor in loaded.items():
        module._parameters[name] = _like(module._parameters.get(name), tensor)
    module.__dict__.pop(_ONCE_FLAG, None)
    with set_current_vllm_config(config), torch.no_grad():
        if layer.deferred:
            module.process_weights_after_loading(config.model_config.dtype)  # type: ignore[operator]
        else:
            _as_on_first_call(module).process_weights_after_loading(module)
            if hasattr(module, "update_param_tp_status"):
                module.update_param_tp_status()  # type: ignore[operator]


def _as_on_first_call(module: torch.nn.Module) -> QuantizeMethodBase:
    """A copy of the module's method that does not know that it ran before.

    MoE methods skip the experts' own step (on CPUs: the packing) once they have a kernel. The live
    kernel stays with the module's method: it refers to the live parameters.
    """
    method: QuantizeMethodBase = copy.copy(module.quant_method)
    if getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None
    return method


def _like(parameter: torch.nn.Parameter | None, tensor: torch.Tensor) -> torch.nn.Parameter:
    """A parameter that holds `tensor` and carries the loader's attributes of `parameter`."""
    if parameter is None:
        return torch.nn.Parameter(tensor, requires_grad=False)
    fresh = torch.Tensor._make_subclass(type(parameter), tensor, False)
    fresh.__dict__.update(parameter.__dict__)
    return fresh


def _plain_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: v for n, v in module.__dict__.items() if isinstance(v, torch.Tensor)}


def _put_back(name: str, live: torch.Tensor, result: torch.Tensor) -> None:
    if live.shape != result.shape or live.dtype != result.dtype:
        raise RecordingError(
            f"{name}: the post-load step made {result.dtype} {tuple(result.shape)}, the live "
            f"parameter is {live.dtype} {tuple(live.shape)}"
        )
    live.copy_(result)
