"""INDEX-CODED: what a rank's pieces hold is the slice of the whole tensor that they claim."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.multiprocess.trainer.models import Kind, make_indexed, wrap
from tests.multiprocess.trainer.processes import RankFailed, join_default_group, run_ranks
from tests.multiprocess.trainer.reading import Held, check_cover, read
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from reshard.board import Deadline
from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard.layout import sharding as layout
from reshard_trainer import dtensors
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.sources import ModuleSource

pytestmark = pytest.mark.multiprocess


def _describe(rank: int, size: int, kind: Kind, folder: str) -> Held:
    join_default_group(rank, size, folder)
    model = wrap(make_indexed(), kind)
    for name in ("all_gather_into_tensor", "_all_gather_base", "all_gather", "all_to_all_single"):
        setattr(dist, name, _refused)
    source = ModuleSource(model, Ensemble.current())
    if kind.startswith(("ddp", "fsdp2", "hsdp")):
        _same_as_dtensors(source, model)
    return read(source)


def _refused(*_: object, **__: object) -> None:
    raise AssertionError("a source gathers nothing")


def _same_as_dtensors(source: ModuleSource, model: nn.Module) -> None:
    """A rank holds as many elements as its local shards have, no more."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        key = FQN(name.removeprefix("module."))
        held = sum([region.volume for region in source.table.regions(key)])
        assert held == local.numel(), (name, held, local.shape)


WORLDS: list[tuple[Kind, int]] = [
    ("ddp", 2),
    ("fsdp2", 1),
    ("fsdp2", 2),
    ("fsdp2", 3),
    ("fsdp2", 4),
    ("fsdp2_dim1", 3),
    ("hsdp", 4),
    ("fsdp2_tp", 4),
    ("fsdp1", 1),
    ("fsdp1", 3),
    ("fsdp1_flat", 4),
    ("fsdp1_hybrid", 4),
    ("zero3", 1),
    ("zero3", 4),
]


@pytest.mark.parametrize(("kind", "size"), WORLDS)
def test_pieces_are_the_slices_that_they_claim(kind: Kind, size: int, tmp_path: Path) -> None:
    ranks = run_ranks(_describe, size, size, kind, str(tmp_path))

    check_cover(ranks, make_indexed().state_dict())  # type: ignore[arg-type]


def _left_gathered(rank: int, size: int, kind: Kind, folder: str) -> Held:
    """FSDP1 as a forward pass leaves it that does not reshard, and as an optimizer finds it."""
    join_default_group(rank, size, folder)
    model = wrap(make_indexed(), kind)
    model(torch.tensor([1, 2, 3])).backward()
    model(torch.tensor([1, 2, 3]))
    return read(ModuleSource(model, Ensemble.current()))


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1_flat"])
def test_shards_are_read_where_forward_has_left_all_gathered(kind: Kind, tmp_path: Path) -> None:
    ranks = run_ranks(_left_gathered, 2, 2, kind, str(tmp_path))

    check_cover(ranks, make_indexed().state_dict())  # type: ignore[arg-type]


def _as_plain_shards(rank: int, size: int, even: bool, folder: str) -> Held:
    """The well-known mistake: FSDP over TP on one dim read as two plain shards, left to right."""
    join_default_group(rank, size, folder)
    right = dtensors._placement

    def mistaken(placement: torch.distributed.tensor.Placement) -> layout.Placement:
        read = right(placement)
        return layout.Shard(read.dim) if isinstance(read, layout.StridedShard) else read

    dtensors._placement = mistaken
    model = make_indexed()
    if even:
        for block in model.blocks:
            block.gate = nn.Linear(6, 16)
    return read(ModuleSource(wrap(model, "fsdp2_tp"), Ensemble.current()))


def test_the_oracle_sees_strided_shards_taken_for_plain_ones(tmp_path: Path) -> None:
    ranks = run_ranks(_as_plain_shards, 4, 4, True, str(tmp_path))

    without_gates = [{k: v for k, v in held.items() if ".gate." not in k} for held in ranks]  # type: ignore[attr-defined]
    expected = {k: v for k, v in make_indexed().state_dict().items() if ".gate." not in k}
    with pytest.raises(AssertionError, match=r"blocks.0.up.weight on rank"):
        check_cover(without_gates, expected)


def test_a_layout_that_does_not_fit_the_local_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"is of shape .* the layout algebra says") as caught:
        run_ranks(_as_plain_shards, 4, 4, False, str(tmp_path))

    for name in ("blocks.0.gate.bias", "blocks.0.gate.weight", "blocks.1.gate.weight"):
        assert name in str(caught.value)


def _partial(rank: int, size: int, folder: str) -> tuple[str, ...]:
    join_default_group(rank, size, folder)
    mesh = init_device_mesh("cpu", (size,))
    model = nn.Module()
    for name in ("a", "b"):
        tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        setattr(model, name, nn.Parameter(tensor))
    with pytest.raises(LayoutError) as caught:
        ModuleSource(model, Ensemble.current())
    return caught.value.faults


def test_partial_sums_are_refused_by_name(tmp_path: Path) -> None:
    faults = run_ranks(_partial, 2, 2, str(tmp_path))

    assert faults[0] == faults[1]
    assert [line.split(":")[0] for line in faults[0]] == ["a", "b"]  # type: ignore[attr-defined]
    assert "each rank holds a partial sum" in faults[0][0]  # type: ignore[index]


def _columns_not_contiguous(rank: int, size: int, folder: str) -> Held:
    join_default_group(rank, size, folder)
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(35.0).reshape(5, 7)
    local = distribute_tensor(whole, mesh, [Shard(1)]).to_local().t().contiguous().t()
    model = nn.Module()
    model.w = nn.Parameter(
        DTensor.from_local(local, mesh, [Shard(1)], shape=whole.shape, stride=(7, 1))
    )
    return read(ModuleSource(model, Ensemble.current()))


def test_local_shards_need_not_be_contiguous(tmp_path: Path) -> None:
    ranks = run_ranks(_columns_not_contiguous, 3, 3, str(tmp_path))

    check_cover(ranks, {"w": torch.arange(35.0).reshape(5, 7)})  # type: ignore[arg-type]


def _offloaded(rank: int, size: int, folder: str) -> str:
    join_default_group(rank, size, folder)
    model = make_indexed()
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (size,)),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
    )
    return str(ModuleSource(model, Ensemble.current()).device)


def test_offloaded_shards_are_read_where_they_lie(tmp_path: Path) -> None:
    assert run_ranks(_offloaded, 2, 2, str(tmp_path)) == ["cpu", "cpu"]


def _subset(rank: int, size: int, folder: str) -> Held | None:
    join_default_group(rank, size, folder)
    group = dist.new_group([2, 1])
    if rank == 0:
        return None
    ensemble = Ensemble.current(group)
    mesh = DeviceMesh("cpu", [1, 2])
    model = make_indexed()
    fully_shard(model, mesh=mesh)
    for payload in (b"", b"from rank 0"):
        mine = payload if ensemble.rank == 0 else b"ignored"
        assert ensemble.broadcast(mine, Deadline.after(20)) == payload
    return read(ModuleSource(model, ensemble))


def test_a_policy_on_some_ranks_of_the_job(tmp_path: Path) -> None:
    ranks = run_ranks(_subset, 3, 3, str(tmp_path))

    check_cover(ranks[1:], make_indexed().state_dict())  # type: ignore[arg-type]


def _outside(rank: int, size: int, folder: str) -> None:
    join_default_group(rank, size, folder)
    group = dist.new_group([0])
    Ensemble.current(group)


def test_attaching_outside_the_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="global rank 1 is not in the group that was given"):
        run_ranks(_outside, 2, 2, str(tmp_path))


def _seven_rows() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 7))
    with torch.no_grad():
        for start, parameter in zip((0, 100), model.parameters(), strict=True):
            count = parameter.numel()
            parameter.copy_(torch.arange(start, start + count).reshape(parameter.shape))
    return model


def _seven_rows_over_six(rank: int, size: int, folder: str) -> Held:
    join_default_group(rank, size, folder)
    model = _seven_rows()
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return read(ModuleSource(model, Ensemble.current()))


def test_rows_are_where_fsdp2_cuts_them_after_tensor_parallelism(tmp_path: Path) -> None:
    """Of 7 rows on dp 3 x tp 2 the last rank holds row 6; its placements say otherwise."""
    ranks = run_ranks(_seven_rows_over_six, 6, 6, str(tmp_path))

    check_cover(ranks, _seven_rows().state_dict())  # type: ignore[arg-type]
