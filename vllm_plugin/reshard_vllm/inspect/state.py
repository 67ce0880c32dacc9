"""Everything that a loaded model computes with, as bytes to compare.

Parameters and buffers, tensors that layers and their helpers keep as plain attributes (aliases,
packed copies, kernels' operands), and what packed linear layers compute, whose weights live in
handlers that no attribute shows.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from reshard.errors import RecordingError
from reshard_vllm.install.handlers import held_by

_DEPTH: Final = 3
_IDENTITY_LIMIT: Final = 1024
_PROBE_ROWS: Final = 64


def state_of(model: torch.nn.Module, config: VllmConfig) -> dict[str, torch.Tensor]:
    """Copies of all tensors of `model` by name, and outputs of its packed layers."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(model):
        state[name] = tensor.detach().clone()
    for name, module in model.named_modules():
        if (output := packed_output(module, config)) is not None:
            state[f"{name}()"] = output
    return state


def addresses(model: torch.nn.Module) -> dict[str, int]:
    """Where each parameter and buffer lies, and each object that holds a packed weight."""
    places = {
        name: tensor.data_ptr()
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    }
    for name, module in model.named_modules():
        places |= {f"{name}.{held.name}": id(held.value) for held in held_by(module)}
    return places


def differences(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """One line for each tensor that is missing, extra, or has other bytes."""
    lines = [f"{name}: missing" for name in wanted.keys() - found.keys()]
    lines += [f"{name}: not in a freshly loaded model" for name in found.keys() - wanted.keys()]
    for name in found.keys() & wanted.keys():
        if fault := _difference(found[name], wanted[name]):
            lines.append(f"{name}: {fault}")
    return sorted(lines)


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return (
            f"{found.dtype} {tuple(found.shape)}, freshly loaded "
            f"{wanted.dtype} {tuple(wanted.shape)}"
        )
    if found.is_meta or wanted.is_meta:
        return "" if found.is_meta and wanted.is_meta else "has no data on one side"
    bytes_found, bytes_wanted = (
        t.contiguous().reshape(-1).view(torch.uint8).reshape(-1, t.element_size())
        for t in (found, wanted)
    )
    count = int((bytes_found != bytes_wanted).any(dim=1).sum())
    return f"{count} of {found.numel()} elements differ" if count else ""


def packed_output(module: torch.nn.Module, config: VllmConfig) -> torch.Tensor | None:
    """What a linear layer with a packed weight makes of the identity (its weight, transposed).

    None for a module that is no such layer. Of a weight too wide for that, its products with a few
    fixed rows.
    """
    if not hasattr(module, "cpu_linear"):
        return None
    width = _input_width(module)
    dtype = getattr(module, "params_dtype", None) or config.model_config.dtype
    if width <= _IDENTITY_LIMIT:
        probe = torch.eye(width, dtype=dtype)
    else:
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(_PROBE_ROWS, width, generator=generator).to(dtype)
    with set_current_vllm_config(config), torch.no_grad():
        method: Any = module.quant_method
        output: torch.Tensor = method.apply(module, probe)
    return output.clone()


def _input_width(module: torch.nn.Module) -> int:
    for attribute in ("input_size_per_partition", "embedding_dim", "input_size"):
        width = getattr(module, attribute, None)
        if isinstance(width, int):
            return width
    raise RecordingError(f"{type(module).__name__} has a packed weight of unknown width")


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    seen: set[int] = set()
    for name, module in model.named_modules():
        for attribute, value in list(module.__dict__.items()):
            if attribute not in ("_parameters", "_buffers", "_modules"):
                yield from _inside(f"{name}.{attribute}", value, seen, _DEPTH)


def _inside(
    path: str, value: object, seen: set[int], depth: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in plain attributes, containers and helper objects of vLLM."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth == 0 or id(value) in seen or isinstance(value, torch.nn.Module | type):
        return
    elif isinstance(value, list | tuple):
        for at, element in enumerate(value):
            yield from _inside(f"{path}.{at}", element, seen, depth - 1)
    elif isinstance(value, dict):
        for key, element in value.items():
            yield from _inside(f"{path}.{key}", element, seen, depth - 1)
    elif type(value).__module__.startswith("vllm.model_executor") and hasattr(value, "__dict__"):
        seen.add(id(value))
        for attribute, element in list(value.__dict__.items()):
            yield from _inside(f"{path}.{attribute}", element, seen, depth - 1)
