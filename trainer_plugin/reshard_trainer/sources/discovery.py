"""Finding a model's tensors: each parameter and persistent buffer, whatever kind of trainer has it.

Coordinate space: the trainer's own names, wrappers included. Not here: canonical names.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from reshard.dtypes import parse_dtype
from reshard.errors import LayoutError
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.names import strip_wrappers
from reshard_trainer.sources.fsdp1 import flat_parameters, is_flat
from reshard_trainer.sources.held import Held, held_dtensor, held_part, held_whole
from reshard_trainer.sources.zero3 import held_partition, is_partitioned

_ON_META: Final = "on the meta device, without values; materialise it before attaching"


@dataclass(frozen=True, slots=True)
class Part:
    """A plain tensor that is one box of a larger one.

    Attributes:
        shape: of the larger, global tensor, in elements.
        offset: of the box in it, in global elements.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]


Parts = Callable[[str, torch.Tensor], Part | None]
"""From a plain tensor's name, wrappers stripped, to what it is a part of; None: it is whole."""


def whole(_name: str, _tensor: torch.Tensor) -> Part | None:
    """No plain tensor is a part of another."""
    return None


def find(model: torch.nn.Module, ensemble: Ensemble, parts: Parts = whole) -> dict[str, Held]:
    """All tensors of `model` that a checkpoint has, by the trainer's names, tied ones under each.

    Raises:
        LayoutError: some cannot be published; lists them all.
    """
    _reshard(model)
    found = dict(flat_parameters(model))
    of_fsdp1 = frozenset(found)
    faults: list[str] = []
    for name, tensor in _checkpoint_tensors(model):
        # FSDP1's own record stands for its parameters, whatever it shows of them at the moment.
        if is_flat(name) or name in of_fsdp1:
            continue
        try:
            found[name] = _held(name, tensor, ensemble, parts)
        except LayoutError as error:
            faults.append(f"{strip_wrappers(name)}: {error}")
    faults += [
        f"{strip_wrappers(name)}: {fault}"
        for name, held in found.items()
        for fault in _unreadable(held.flat)
    ]
    if faults:
        raise LayoutError("these weights cannot be published", faults)
    return found


def _reshard(model: torch.nn.Module) -> None:
    """Put FSDP2's shards back where a module was left unsharded, so that they are what we see."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _checkpoint_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under every name that they have."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _held(name: str, tensor: torch.Tensor, ensemble: Ensemble, parts: Parts) -> Held:
    if is_partitioned(tensor):
        return held_partition(tensor, ensemble)
    if isinstance(tensor, DTensor):
        _refuse_strange(tensor.to_local())
        return held_dtensor(tensor, ensemble)
    _refuse_strange(tensor)
    part = parts(strip_wrappers(name), tensor)
    if part is None:
        return held_whole(tensor)
    return held_part(tensor, part.shape, part.offset)


def _refuse_strange(local: torch.Tensor) -> None:
    if local.is_meta:
        raise LayoutError(_ON_META)
    if type(local) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise LayoutError(f"a {type(local).__name__}; only plain tensors and DTensors are known")
    if local.layout is not torch.strided:
        raise LayoutError(f"of layout {local.layout}; only strided tensors can be published")


def _unreadable(flat: torch.Tensor) -> Iterator[str]:
    if flat.is_meta:
        yield _ON_META
    try:
        parse_dtype(str(flat.dtype))
    except LayoutError as error:
        yield str(error)
