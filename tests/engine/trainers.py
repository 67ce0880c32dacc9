"""Trainer ranks of every kind, in real processes, on real Hugging Face models."""

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from tests.multiprocess.trainer.processes import join_default_group
from tests.support.checkpoints import Family, make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

import reshard_trainer
from reshard_trainer.reports import RefitReport

Kind = Literal["plain", "ddp", "fsdp2", "hsdp", "fsdp2_tp"]


@dataclass(frozen=True, slots=True)
class Trainer:
    """A way to hold a model.

    Attributes:
        kind: which.
        ranks: number of processes.
    """

    kind: Kind
    ranks: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.ranks}"


TRAINERS = (
    Trainer("plain", 1),
    Trainer("fsdp2", 1),
    Trainer("ddp", 2),
    Trainer("fsdp2", 2),
    Trainer("fsdp2", 3),
    Trainer("fsdp2", 4),
    Trainer("hsdp", 4),
    Trainer("fsdp2_tp", 4),
)


def publish(
    rank: int,
    trainer: Trainer,
    family: Family,
    seed: int,
    url: str,
    version: int,
    folder: str,
    settings: dict[str, object],
) -> RefitReport | None:
    """One trainer rank: hold the weights number `seed`, take one step that changes nothing.

    Returns:
        the report of rank 0.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    if trainer.kind != "plain":
        join_default_group(rank, trainer.ranks, folder)
    model = wrap(make_model(family, seed=seed), trainer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    arguments: dict[str, object] = {"deadline": 60.0, "version": version - 1, **settings}
    with reshard_trainer.attach(model, optimizer, [url], **arguments) as hook:  # type: ignore[arg-type]
        optimizer.step()
        report = hook.last_report
    if dist.is_initialized():
        dist.destroy_process_group()
    return report if rank == 0 else None


def wrap(model: nn.Module, trainer: Trainer) -> nn.Module:
    """`model` as a trainer of this kind holds it."""
    match trainer.kind:
        case "plain":
            return model
        case "ddp":
            return nn.parallel.DistributedDataParallel(model)
        case "fsdp2":
            return _sharded(model, trainer, (trainer.ranks,), ("shard",))
        case "hsdp":
            return _sharded(model, trainer, (2, trainer.ranks // 2), ("replicate", "shard"))
        case "fsdp2_tp":
            mesh = init_device_mesh("cpu", (trainer.ranks // 2, 2), mesh_dim_names=("dp", "tp"))
            for layer in model.model.layers:  # type: ignore[union-attr]
                parallelize_module(layer, mesh["tp"], _tensor_parallel(layer))
            for layer in model.model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
            return model


def _tensor_parallel(layer: nn.Module) -> dict[str, ParallelStyle]:
    """Megatron's cut of a decoder layer, for the linears that it has."""
    styles: dict[str, ParallelStyle] = {
        "q_proj": ColwiseParallel(),
        "k_proj": ColwiseParallel(),
        "v_proj": ColwiseParallel(),
        "gate_proj": ColwiseParallel(),
        "up_proj": ColwiseParallel(),
        "o_proj": RowwiseParallel(),
        "down_proj": RowwiseParallel(),
    }
    return {
        name: styles[name.rpartition(".")[2]]
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in styles
    }


def _sharded(
    model: nn.Module, trainer: Trainer, shape: tuple[int, ...], names: tuple[str, ...]
) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
