"""Models whose every element says where it belongs, wrapped in each way a trainer wraps them."""

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

Kind = Literal[
    "plain",
    "ddp",
    "fsdp2",
    "fsdp2_dim1",
    "hsdp",
    "fsdp2_tp",
    "fsdp1",
    "fsdp1_flat",
    "fsdp1_hybrid",
    "zero3",
]
KINDS = get_args(Kind)


_TENSOR_PARALLEL = {
    "gate": ColwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class Block(nn.Module):
    """Uneven over 2, 3 and 4 ranks; `bias` of 2 rows leaves some ranks without any."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 14)
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 7)
        self.tiny = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.up(x)))
        out: torch.Tensor = self.tiny(torch.relu(hidden)[..., :5]).sum() + self.gate(x).sum()
        return out


class Tied(nn.Module):
    """Two blocks, a tied head, a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        loss: torch.Tensor = self.head(hidden).sum() * 0.1
        for block in self.blocks:
            loss = loss + block(hidden)
        return loss


def make_indexed() -> Tied:
    """A `Tied` in which each element is unique to its (name, index)."""
    model = Tied()
    start = 0
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.arange(start, start + tensor.numel()).reshape(tensor.shape))
            start += tensor.numel()
    return model


def wrap(model: Tied, kind: Kind) -> nn.Module:
    """`model` as a trainer of this kind holds it; the default group is up, but for `plain`."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    match kind:
        case "plain":
            return model
        case "ddp":
            return nn.parallel.DistributedDataParallel(model)
        case "fsdp2":
            return _sharded(model, init_device_mesh("cpu", (size,)))
        case "fsdp2_dim1":
            mesh = init_device_mesh("cpu", (size,))
            fully_shard(
                model,
                mesh=mesh,
                shard_placement_fn=lambda p: (
                    Shard(1) if p.ndim > 1 and not p.shape[1] % size else None
                ),
            )
            return model
        case "fsdp1" | "fsdp1_flat":
            return _fsdp1(model, use_orig_params=kind == "fsdp1")
        case "fsdp1_hybrid":
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
            strategy = ShardingStrategy.HYBRID_SHARD
            return _fsdp1(model, use_orig_params=True, sharding_strategy=strategy, device_mesh=mesh)
        case "zero3":
            return stand_in_for_zero3(model)
        case "hsdp":
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
            return _sharded(model, mesh)
        case "fsdp2_tp":
            mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
            for block in model.blocks:
                plan = {
                    "gate": ColwiseParallel(),
                    "up": ColwiseParallel(),
                    "down": RowwiseParallel(),
                }
                parallelize_module(block, mesh["tp"], plan)
            return _sharded(model, mesh["dp"])


def _fsdp1(model: Tied, **options: object) -> nn.Module:
    """Each block a unit, the tied weights together in the root's."""
    options["device_id"] = torch.device("cpu")
    for at, block in enumerate(model.blocks):
        model.blocks[at] = FullyShardedDataParallel(block, **options)  # type: ignore[arg-type]
    return FullyShardedDataParallel(model, **options)  # type: ignore[arg-type]


def stand_in_for_zero3(model: nn.Module) -> nn.Module:
    """Stand-in for `deepspeed.initialize`: parameters with the attributes of its partitioned ones.

    Each parameter is flattened, padded, and cut into equal intervals, of which this rank keeps one;
    the parameter itself is left empty.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, parameter in enumerate(model.parameters()):
        length = -(-parameter.numel() // size)
        padded = torch.full((length * size,), -7.0, dtype=parameter.dtype)
        padded[: parameter.numel()] = parameter.detach().flatten()
        interval = nn.Parameter(padded[rank * length : (rank + 1) * length].clone())
        parameter.ds_id = number  # type: ignore[attr-defined]
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.ds_numel = parameter.numel()  # type: ignore[attr-defined]
        parameter.ds_tensor = interval  # type: ignore[attr-defined]
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer steps: ZeRO's own intervals, or the parameters."""
    return [getattr(p, "ds_tensor", p) for p in model.parameters() if p.requires_grad]


def _columns(parameter: nn.Parameter, size: int) -> Shard | None:
    return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % size == 0 else None


def _sharded(model: Tied, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def unshard(model: nn.Module) -> None:
    """As a forward and backward pass leave it that do not reshard."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
