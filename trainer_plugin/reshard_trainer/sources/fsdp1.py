"""FSDP1 (`FullyShardedDataParallel`): parameters flattened into one, of which each rank has a part.

Nothing is gathered: the bookkeeping of a flat parameter says which interval of each original
parameter lies where in this rank's part. With `use_orig_params` or without, it is the same.
"""

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle

from reshard.errors import LayoutError
from reshard_trainer.sources.held import Held, held_interval

WRAPPED = "_fsdp_wrapped_module"


def flat_parameters(model: torch.nn.Module) -> Iterator[tuple[str, Held]]:
    """The original parameters of all FSDP1 modules in `model`, under all their names.

    Raises:
        LayoutError: parameters whose elements are not where FSDP1's own records say.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        handle = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None:
            yield from _of_handle(f"{prefix}.{WRAPPED}" if prefix else WRAPPED, handle)


def is_flat(name: str) -> bool:
    """Whether a parameter's name is that of a flat parameter."""
    return name.rpartition(".")[2] == "_flat_param"


def _of_handle(prefix: str, handle: FlatParamHandle) -> Iterator[tuple[str, Held]]:
    flat = handle.flat_param
    shard = _local_shard(flat)
    _refuse_strange(prefix, flat, shard)
    held = {}
    for name, shape, found in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
        first = found.intra_param_start_idx or 0
        start, count = found.offset_in_shard or 0, found.numel_in_shard or 0
        held[name] = held_interval(shard, tuple(shape), first, start, count)
        yield f"{prefix}.{name}", held[name]
    for shared in flat._shared_param_infos:
        other = _joined(shared.prim_module_name, shared.prim_param_name)
        yield f"{prefix}.{_joined(shared.module_name, shared.param_name)}", held[other]


def _local_shard(flat: FlatParameter) -> torch.Tensor:
    """This rank's part; also where forward has left the whole parameter gathered."""
    shard: torch.Tensor = getattr(flat, "_local_shard", flat.data)
    return shard.detach()


def _refuse_strange(prefix: str, flat: FlatParameter, shard: torch.Tensor) -> None:
    faults = [
        f"{prefix}.{name}: FSDP1 over DTensor is not supported; use fully_shard (FSDP2)"
        for name, extension in zip(flat._fqns, flat._param_extensions, strict=True)
        if extension is not None
    ]
    faults += [
        f"{prefix}.{name}: FSDP1 has flattened it in the order of its strides {stride}; make it "
        "contiguous before wrapping"
        for name, stride, contiguous in zip(
            flat._fqns, flat._strides, flat._contiguities, strict=True
        )
        if not contiguous
    ]
    for name, part, found in zip(
        flat._fqns, flat._params or (), flat._shard_param_infos, strict=False
    ):
        if not found.in_shard or part.numel() != found.numel_in_shard:
            continue
        place = shard.data_ptr() + (found.offset_in_shard or 0) * shard.element_size()
        if part.data_ptr() != place:
            faults.append(
                f"{prefix}.{name}: was given storage of its own, which FSDP1 takes into its flat "
                "parameter at the next forward; write into the parameter instead"
            )
    if faults:
        raise LayoutError("these FSDP1 parameters cannot be published", faults)


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
