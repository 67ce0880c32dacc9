"""Trainers of other kinds, small: each as its ranks hold it, and whole, as an oracle needs it.

Whole models have values that are small integers, so that sums and products are exact.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from tests.multiprocess.trainer.models import Block, make_indexed, stand_in_for_zero3
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard

import reshard_trainer
from reshard.board import Deadline
from reshard.ids import FQN
from reshard.layout.holding import TensorLayout
from reshard.layout.pieces import Piece
from reshard.layout.region import Region
from reshard.layout.table import PieceTable
from reshard.layout.view import StridedView
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.sources.recording import StateDict

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainerKind:
    """One way of training.

    Attributes:
        make: this rank's model, wrapped; the default group is up.
        canonical: the whole tensors by checkpoint name after so many steps, each of which adds
            `STEP` to every trained parameter.
        settings: of `attach`.
        size: of the trainer, in ranks.
    """

    make: Callable[[], nn.Module]
    canonical: Callable[[int], Tensors]
    settings: Mapping[str, object] = field(default_factory=dict)
    size: int = 2


STEP = 1000.0
"""What a step adds to each trained element; a power of two of it would hide no error either."""


def count_up(model: nn.Module) -> None:
    """Give every element its own number, in the order of names."""
    start = 0
    with torch.no_grad():
        for _, tensor in sorted({**dict(model.named_parameters())}.items()):
            tensor.copy_(torch.arange(start, start + tensor.numel()).reshape(tensor.shape))
            start += tensor.numel()


def stepped(model: nn.Module, steps: int) -> nn.Module:
    """`model` after so many steps."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(steps * STEP)
    return model


# Megatron: qkv grouped by KV head, experts stacked, rows in Meta's rotary order.

HEADS, GROUPS, WIDTH, HIDDEN, EXPERTS, INNER = 6, 2, 4, 5, 4, 3


class Grouped(nn.Module):
    """Attention with grouped qkv and bias, rotary rows as Meta orders them, and stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        rows = (HEADS + 2 * GROUPS) * WIDTH
        self.linear_qkv = nn.Linear(HIDDEN, rows)
        self.experts_fc1 = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, HIDDEN))
        self.experts_fc2 = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, INNER))
        self.norm = nn.Parameter(torch.zeros(HIDDEN))


def from_grouped(state: StateDict) -> Tensors:
    """To q, k, v with halves of each head apart, and to one tensor an expert."""
    out = {"norm.weight": state["norm"]}
    for kind in ("weight", "bias"):
        grouped = state[f"linear_qkv.{kind}"]
        shape = (GROUPS, HEADS // GROUPS + 2, WIDTH, *grouped.shape[1:])
        q, k, v = torch.split(grouped.view(shape), [HEADS // GROUPS, 1, 1], dim=1)
        out[f"q_proj.{kind}"] = _halves(q)
        out[f"k_proj.{kind}"] = _halves(k)
        out[f"v_proj.{kind}"] = v.reshape(-1, *grouped.shape[1:])
    fused = zip(state["experts_fc1"].unbind(), state["experts_fc2"].unbind(), strict=True)
    for number, (first, second) in enumerate(fused):
        gate, up = first.chunk(2)
        out[f"experts.{number}.gate_proj.weight"] = gate
        out[f"experts.{number}.up_proj.weight"] = up
        out[f"experts.{number}.down_proj.weight"] = second
    return out


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """Each head's rows from (0, 1), (2, 3), ... to all first ones, then all second ones."""
    heads = rows.reshape(-1, WIDTH // 2, 2, *rows.shape[3:])
    return heads.transpose(1, 2).reshape(-1, *rows.shape[3:])


def whole_grouped() -> Grouped:
    model = Grouped()
    count_up(model)
    return model


def canonical_grouped(steps: int) -> Tensors:
    """By hand, row by row, with no operation that the adapter uses."""
    state = stepped(whole_grouped(), steps).state_dict()
    out = {"norm.weight": state["norm"]}
    for kind in ("weight", "bias"):
        grouped = state[f"linear_qkv.{kind}"]
        rows: dict[str, list[torch.Tensor]] = {"q_proj": [], "k_proj": [], "v_proj": []}
        for head in range(HEADS):
            group, inside = divmod(head, HEADS // GROUPS)
            start = (group * (HEADS // GROUPS + 2) + inside) * WIDTH
            rows["q_proj"] += [grouped[start + at] for at in (0, 2, 1, 3)]
        for group in range(GROUPS):
            start = (group * (HEADS // GROUPS + 2) + HEADS // GROUPS) * WIDTH
            rows["k_proj"] += [grouped[start + at] for at in (0, 2, 1, 3)]
            rows["v_proj"] += [grouped[start + WIDTH + at] for at in range(WIDTH)]
        out |= {f"{name}.{kind}": torch.stack(held) for name, held in rows.items()}
    for number in range(EXPERTS):
        first = state["experts_fc1"][number]
        out[f"experts.{number}.gate_proj.weight"] = first[:INNER]
        out[f"experts.{number}.up_proj.weight"] = first[INNER:]
        out[f"experts.{number}.down_proj.weight"] = state["experts_fc2"][number]
    return out


def grouped_fsdp2() -> nn.Module:
    model = whole_grouped()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def grouped_in_parts() -> nn.Module:
    """As Megatron holds it: plain tensors, qkv cut by KV head, experts by number."""
    model = whole_grouped()
    rank, size = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        for name in ("linear_qkv.weight", "linear_qkv.bias", "experts_fc1", "experts_fc2"):
            owner, _, last = name.rpartition(".")
            module = model.get_submodule(owner)
            part = getattr(module, last).chunk(size)[rank].clone()
            setattr(module, last, nn.Parameter(part))
    return model


def parts_of_grouped(name: str, tensor: torch.Tensor) -> reshard_trainer.Part | None:
    if name == "norm":
        return None
    rows = tensor.shape[0]
    shape = (rows * dist.get_world_size(), *tensor.shape[1:])
    offset = (rows * dist.get_rank(), *(0 for _ in tensor.shape[1:]))
    return reshard_trainer.Part(shape, offset)


def canonical_centred(steps: int) -> Tensors:
    out = canonical_grouped(steps)
    return {**out, "norm.weight": out["norm.weight"].float() + 1}


# Expert parallel and pipeline parallel: each rank has modules of its own.


class Stage(nn.Module):
    """A stage: its layers, numbered from zero; the embedding on the first and on the last."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.norm = nn.LayerNorm(3)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(3, 2) for _ in range(experts))})
            for _ in range(layers)
        )


def whole_stages() -> Stage:
    """What two stages with two layers, or two expert-parallel ranks with two experts, make up."""
    model = Stage(4, 4)
    count_up(model)
    return model


def canonical_stages(steps: int) -> Tensors:
    return dict(stepped(whole_stages(), steps).state_dict())


def my_stage() -> nn.Module:
    """Half of the layers, and the embedding; of the final norm, only the last stage has one."""
    model = whole_stages()
    rank = dist.get_rank()
    model.layers = model.layers[2 * rank : 2 * rank + 2]
    if rank == 0:
        del model.norm
    return model


def my_experts() -> nn.Module:
    """Half of each layer's experts."""
    model = whole_stages()
    rank = dist.get_rank()
    for layer in model.layers:
        layer["experts"] = layer["experts"][2 * rank : 2 * rank + 2]  # type: ignore[operator,index]
    return model


def stage_names(name: str) -> str:
    return reshard_trainer.global_names(layers=2 * dist.get_rank())(name)


def expert_names(name: str) -> str:
    return reshard_trainer.global_names(experts=2 * dist.get_rank())(name)


# transformers and PEFT.


def _mixture() -> nn.Module:
    from tests.support.checkpoints import make_model

    model: nn.Module = make_model("qwen3_moe", seed=1)
    return model


def whole_mixture() -> nn.Module:
    model = _mixture()
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_((parameter * 64).round())
    return model


def mixture_fsdp2() -> nn.Module:
    model = whole_mixture()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def saved(model: nn.Module) -> Tensors:
    """What `save_pretrained` writes."""
    import tempfile
    from pathlib import Path

    from tests.support.checkpoints import checkpoint_tensors

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        return checkpoint_tensors(Path(folder))


def canonical_mixture(steps: int) -> Tensors:
    return saved(stepped(whole_mixture(), steps))


def whole_adapted() -> nn.Module:
    """A model under PEFT: LoRA on a linear layer and on the embedding, and a head trained whole."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
    )
    from tests.support.checkpoints import make_model

    torch.manual_seed(2)
    model: nn.Module = get_peft_model(make_model("llama", seed=2), config)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_((parameter * 8).round().clamp(-4, 4))
    return model


def canonical_adapted(steps: int) -> Tensors:
    """PEFT's own merge, then transformers' own way of saving."""
    return saved(stepped(whole_adapted(), steps).merge_and_unload())  # type: ignore[operator]


def adapted_fsdp2() -> nn.Module:
    model = whole_adapted()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def adapted_fsdp1() -> nn.Module:
    """Base and factors in one flat parameter."""
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(whole_adapted(), device_id=cpu, use_orig_params=True)


def adapted_zero3() -> nn.Module:
    return stand_in_for_zero3(whole_adapted())


# Wrappers at every depth, and weights on the CPU.


def _indexed(steps: int) -> Tensors:
    return dict(stepped(make_indexed(), steps).state_dict())


def wrapped_deep() -> nn.Module:
    """Activation checkpointing inside, each block compiled, FSDP2 and compiled again around."""
    model = make_indexed()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for at, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        block.up = checkpoint_wrapper(block.up)  # type: ignore[assignment]
        model.blocks[at] = torch.compile(block, backend="eager")  # type: ignore[assignment]
        fully_shard(model.blocks[at], mesh=mesh)
    fully_shard(model, mesh=mesh)
    compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return compiled


def offloaded() -> nn.Module:
    model = make_indexed()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return model


# A source that a user wrote.


class HandMade:
    """Rows of one tensor, dealt out to the ranks in turn: no placement says this."""

    def __init__(self, ensemble: Ensemble) -> None:
        self.device = torch.device("cpu")
        self.moves = 0
        self.unused: tuple[str, ...] = ()
        self.prepares = False
        self._rows = rows = range(ensemble.rank, 7, ensemble.size)
        self._flat = next(iter(OWNED)).detach().view(-1)
        pieces = [
            Piece(Region((row, 0), (1, 3)), "rows", StridedView(3 * at, (1, 3), (3, 1)))
            for at, row in enumerate(rows)
        ]
        self.table = PieceTable({FQN("w"): pieces})
        self._layout = (TensorLayout(FQN("w"), (7, 3), "float32", self.table.regions(FQN("w"))),)

    def layout(self) -> tuple[TensorLayout, ...]:
        return self._layout

    def storage(self, key: str) -> torch.Tensor:
        return self._flat

    def refresh(self) -> None:
        pass

    def prepare(self, deadline: Deadline) -> None:
        pass


OWNED: list[nn.Parameter] = []
"""This rank's rows; a user's source knows its trainer."""


def dealt_rows() -> nn.Module:
    whole = torch.arange(21.0).view(7, 3)
    model = nn.Module()
    model.w = nn.Parameter(whole[dist.get_rank() :: dist.get_world_size()].clone())
    OWNED.append(model.w)
    return model


def canonical_rows(steps: int) -> Tensors:
    return {"w": torch.arange(21.0).view(7, 3) + steps * STEP}


KINDS: dict[str, TrainerKind] = {
    "megatron's layout on FSDP2": TrainerKind(
        grouped_fsdp2, canonical_grouped, {"adapter": from_grouped}, 3
    ),
    "megatron's layout in parts": TrainerKind(
        grouped_in_parts,
        canonical_centred,
        {
            "adapter": from_grouped,
            "parts": parts_of_grouped,
            "transforms": {"*norm*": reshard_trainer.ADD_ONE},
        },
    ),
    "pipeline parallel": TrainerKind(my_stage, canonical_stages, {"rename": stage_names}),
    "expert parallel": TrainerKind(my_experts, canonical_stages, {"rename": expert_names}),
    "transformers' fused experts on FSDP2": TrainerKind(mixture_fsdp2, canonical_mixture, {}, 3),
    "PEFT on FSDP2": TrainerKind(adapted_fsdp2, canonical_adapted, {}, 3),
    "PEFT on FSDP1": TrainerKind(adapted_fsdp1, canonical_adapted),
    "PEFT on ZeRO-3 (stand-in)": TrainerKind(adapted_zero3, canonical_adapted, {}, 3),
    "wrappers at every depth": TrainerKind(wrapped_deep, _indexed),
    "weights on the CPU": TrainerKind(offloaded, _indexed),
    "a source of one's own": TrainerKind(dealt_rows, canonical_rows, {"source": HandMade}, 3),
}
