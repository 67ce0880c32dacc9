"""What loaders do, one by one: carried out from the recording, it leaves the loader's own bits."""

from dataclasses import replace

import pytest
import torch
from tests.unit.recording.loaders import Case, Loader, Model, carried_out, differences, same_bits
from torch import nn
from torch.nn.functional import pad

from reshard.session import TensorSpec
from reshard_vllm.install.shadow import coverage
from reshard_vllm.recording.loader_map import record

Weights = dict[str, torch.Tensor]


def plain(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"])
    m.q.data.copy_(w["y"])


def fused_halves(m: Model, w: Weights) -> None:
    m.p.data[:2].copy_(w["x"][:2])
    m.p.data.narrow(0, 2, 2).copy_(w["y"][2:])


def interleaved_columns(m: Model, w: Weights) -> None:
    m.p.data[:, ::2].copy_(w["x"][:, :3])
    m.p.data[:, 1::2].copy_(w["y"][:, 3:])


def transposed(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"].reshape(6, 4).t())


def cloned(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"].reshape(6, 4).t().contiguous())


def concatenated(m: Model, w: Weights) -> None:
    m.p.data.copy_(torch.cat([w["y"][1:3], w["x"][torch.tensor([0, 3])]]))


def stacked(m: Model, w: Weights) -> None:
    m.p.data.view(2, 2, 6).copy_(torch.stack([w["x"][:2], w["y"][:2]], dim=1))


def flipped(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"].flip(0).roll(1, 1))


def buffer_of_zeros(m: Model, w: Weights) -> None:
    fused = torch.zeros(4, 6)
    fused[:2] = w["x"][2:]
    fused[3] = w["y"][0]
    m.p.data.copy_(fused)


def buffer_like_the_source(m: Model, w: Weights) -> None:
    fused = w["x"].new_empty(4, 6)
    fused[:2].copy_(w["x"][2:])
    fused[2:].copy_(w["y"][:2])
    m.p.data.copy_(fused)


def zeros_mixed_in(m: Model, w: Weights) -> None:
    m.p.data.copy_(torch.cat([w["x"][:3], torch.zeros(1, 6)]))


def ones_mixed_in(m: Model, w: Weights) -> None:
    m.p.data.copy_(torch.cat([w["x"][:3], torch.ones(1, 6)]))


def padded_with_zero(m: Model, w: Weights) -> None:
    m.p.data.copy_(pad(w["x"][:3], (0, 0, 0, 1)))


def padded_with_one(m: Model, w: Weights) -> None:
    m.p.data.copy_(pad(w["x"][:3], (0, 0, 0, 1), value=1.0))


def padded_vocabulary(m: Model, w: Weights) -> None:
    m.p.data[:3].copy_(w["x"][:3])
    m.p.data[3:].fill_(0)


def row_zeroed_afterwards(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"])
    m.p.data[1].fill_(0)


def row_of_another_afterwards(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"].flip(0))
    m.p.data[1:3, ::2].copy_(w["y"][:2, :3])


def written_twice(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["y"])
    m.p.data.copy_(w["x"])


def cast_on_the_way(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"].to(torch.bfloat16))


def cast_up_on_the_way(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"].to(torch.float64).clone())


def source_changed_in_place(m: Model, w: Weights) -> None:
    w["x"].mul_(2)
    m.p.data.copy_(w["x"])


def source_reshaped_in_place(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"].unsqueeze_(0)[0])


def negated_exponential(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"])
    m.p.data.copy_(-torch.exp(m.p.float()))


def exponential_of_a_transposed(m: Model, w: Weights) -> None:
    m.p.data.copy_(torch.exp(w["x"].reshape(6, 4).t()))


def sum_of_two(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"] + w["y"])


def value_kept_from_before(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"])
    before = m.p * 2
    m.p.data.copy_(torch.exp(m.p))
    m.p.data.copy_(before + m.p)


def landing_after_it_was_read(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"])
    before = m.p * 2
    m.p.data.copy_(w["y"])
    m.p.data.copy_(before + m.p)


def normalised(m: Model, w: Weights) -> None:
    m.p.data.copy_(torch.nn.functional.normalize(w["x"], dim=0))


def added_in_place(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"])
    m.p.data.add_(1)


def tied_by_copy(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"].flip(0))
    m.q.data[:, :3].copy_(m.p.data[:, 3:])


def copied_before_it_changed(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"])
    m.q.data.copy_(m.p)
    m.p.data.copy_(w["y"])


def bits_seen_otherwise(m: Model, w: Weights) -> None:
    moved = w["x"].clone().view(torch.uint8).reshape(4, 6, 4).flip(0).reshape(4, 24)
    m.p.data.copy_(moved.view(torch.float32))


def positions_on_the_weights_device(m: Model, w: Weights) -> None:
    mine = torch.tensor([True, False, True, True]).nonzero().flatten().to(w["x"].device)
    m.p.data[: len(mine)].copy_(w["x"][mine])
    m.q.data[0].copy_(w["x"][int(mine[1].item())])


def rebound_to_the_source(m: Model, w: Weights) -> None:
    m.p.data = w["x"]


def rebound_to_a_copy(m: Model, w: Weights) -> None:
    m.p.data = w["x"].flip(0)
    m.p.data[0].fill_(3)


def rebound_with_another_dtype(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"])
    m.p.data = m.p.data.to(torch.float64)


def rebound_before_it_is_loaded(m: Model, w: Weights) -> None:
    m.p.data = m.p.data.clone()
    m.p.data.copy_(w["x"])


def registered_anew(m: Model, w: Weights) -> None:
    m.register_parameter("p", nn.Parameter(torch.zeros(4, 6), requires_grad=False))
    m.p.data.copy_(w["x"])


def into_a_buffer(m: Model, w: Weights) -> None:
    m.b.copy_(w["x"])


EVERYWHERE = (
    *(plain, fused_halves, interleaved_columns, transposed, cloned, concatenated, stacked, flipped),
    *(buffer_of_zeros, buffer_like_the_source, zeros_mixed_in, ones_mixed_in),
    *(padded_with_zero, padded_with_one, padded_vocabulary),
    *(row_zeroed_afterwards, row_of_another_afterwards, written_twice),
    *(cast_on_the_way, cast_up_on_the_way, source_changed_in_place, source_reshaped_in_place),
    *(negated_exponential, exponential_of_a_transposed, sum_of_two, normalised, added_in_place),
    *(value_kept_from_before, landing_after_it_was_read, tied_by_copy, copied_before_it_changed),
    *(bits_seen_otherwise, positions_on_the_weights_device, rebound_with_another_dtype),
    *(rebound_before_it_is_loaded, registered_anew, into_a_buffer),
)
ON_META = (rebound_to_the_source, rebound_to_a_copy)
"""A parameter on the CPU cannot be bound to a tensor without data."""


@pytest.mark.parametrize("loader", [*EVERYWHERE, *ON_META])
def test_skeleton_without_data(loader: Loader) -> None:
    assert differences(Case(loader)) == []


@pytest.mark.parametrize("loader", EVERYWHERE)
def test_skeleton_on_the_cpu_is_left_alone(loader: Loader) -> None:
    assert differences(Case(loader, device="cpu")) == []


@pytest.mark.parametrize("loader", [plain, concatenated, cast_on_the_way, row_zeroed_afterwards])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
)
def test_one_cast(loader: Loader, source: torch.dtype, target: torch.dtype) -> None:
    assert differences(Case(loader, source, target)) == []


def test_a_skeleton_on_the_cpu_is_not_written() -> None:
    case = Case(negated_exponential, device="cpu")
    skeleton = case.skeleton()
    skeleton.p.data.fill_(7)
    record(skeleton, [TensorSpec(name, shape, "float32") for name, shape in case.shapes.items()])
    assert (skeleton.p == 7).all()


@pytest.mark.parametrize(
    "loader",
    [
        row_zeroed_afterwards,
        row_of_another_afterwards,
        written_twice,
        padded_with_one,
        tied_by_copy,
    ],
)
def test_every_place_has_one_landing(loader: Loader) -> None:
    recorded = Case(loader).recorded()
    for key, slot in recorded.slots.items():
        marks = torch.zeros(slot.shape, dtype=torch.int)
        for landing in recorded.landings.landings:
            if landing.piece.storage == key:
                view = landing.piece.view
                marks.as_strided(view.shape, view.stride, view.offset).add_(1)
        assert marks.max() <= 1


def test_only_what_is_needed_is_staged() -> None:
    """The rows of another rank do not travel for a computation either."""

    def shard(m: Model, w: Weights) -> None:
        m.p.data[:2].copy_(w["x"][2:])
        m.p.data[:2].copy_(-torch.exp(m.p.data[:2]))

    recorded = Case(shard).recorded()
    assert [landing.piece.region.offset for landing in recorded.landings.landings] == [(2, 0)]
    assert sum(landing.piece.region.volume for landing in recorded.landings.landings) == 12


def test_memory_that_nobody_wrote_covers_nothing() -> None:
    def half(m: Model, w: Weights) -> None:
        fused = w["x"].new_empty(4, 6)
        fused[:2].copy_(w["x"][:2])
        m.p.data.copy_(fused)

    assert coverage(Case(half).recorded())["p"] == 12


def test_names_that_are_read_by_nobody_are_unused() -> None:
    assert Case(cloned).recorded().unused == ("y",)


def test_names_of_one_storage_share_a_slot() -> None:
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__(plain)
            self.q = self.p

    with torch.device("meta"):
        tied = Tied()
    recorded = record(tied, [TensorSpec(name, (4, 6), "float32") for name in "xy"])
    assert recorded.slots["p"].names == ("p", "q")
    assert {landing.name for landing in recorded.landings.landings} == {"y"}


def test_the_oracle_sees_a_shifted_landing() -> None:
    case = Case(fused_halves)
    recorded = case.recorded()
    first, second = recorded.landings.landings
    recorded.landings.landings[:] = [
        replace(first, piece=second.piece),
        replace(second, piece=first.piece),
    ]
    checkpoint = case.checkpoint(1)
    assert not same_bits(carried_out(recorded, checkpoint)["p"], case.loaded(checkpoint)["p"])


def test_the_oracle_sees_a_lost_constant() -> None:
    case = Case(ones_mixed_in)
    recorded = case.recorded()
    recorded.landings.constants.clear()
    checkpoint = case.checkpoint(1)
    assert not same_bits(carried_out(recorded, checkpoint)["p"], case.loaded(checkpoint)["p"])


def test_the_oracle_sees_a_cast_left_out() -> None:
    case = Case(cast_on_the_way)
    moved = replace(case, loader=plain)
    checkpoint = case.checkpoint(1)
    assert not same_bits(
        carried_out(moved.recorded(), checkpoint)["p"], case.loaded(checkpoint)["p"]
    )
