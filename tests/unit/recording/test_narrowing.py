"""Only the elements that a rank keeps travel, where the loader's arithmetic allows it."""

from collections.abc import Callable
from math import prod

import pytest
import torch
from tests.unit.recording.loaders import Case, Model, differences

Weights = dict[str, torch.Tensor]


def computed_then_sliced(m: Model, w: Weights) -> None:
    """Mamba's A, on a rank that keeps two of the rows."""
    m.p.data[:2].copy_(-torch.exp(w["x"].float())[2:])


def through_several_steps(m: Model, w: Weights) -> None:
    whole = (w["x"] * w["y"]).clamp(-1, 1).to(torch.float64)
    m.p.data[1:2].copy_((whole + 0.5)[1:2])


def in_place_on_an_intermediate(m: Model, w: Weights) -> None:
    whole = w["x"].float().clone()
    whole.mul_(2).add_(1)
    m.p.data[:2].copy_(torch.sqrt(whole.abs())[:2])


def two_slices_of_one(m: Model, w: Weights) -> None:
    whole = torch.exp(w["x"])
    m.p.data[:1].copy_(whole[:1])
    m.p.data[1:2].copy_(whole[3:])


def transposed_and_sliced(m: Model, w: Weights) -> None:
    m.p.data.view(-1)[:8].view(2, 4).copy_(torch.exp(w["x"]).t()[4:])


def broadcast(m: Model, w: Weights) -> None:
    """One row for all; only its first columns are kept, with two rows of the other."""
    m.p.data[:2, :3].copy_((torch.exp(w["x"]) * w["y"][:1])[:2, :3])


def with_constants(m: Model, w: Weights) -> None:
    m.p.data[:2].copy_((torch.exp(w["x"]) + torch.arange(24.0).view(4, 6))[2:])


def joined(m: Model, w: Weights) -> None:
    m.p.data[:2].copy_(torch.exp(torch.cat([w["x"], w["y"]]))[3:5])


def joined_columns(m: Model, w: Weights) -> None:
    m.p.data[:, :4].copy_(torch.exp(torch.cat([w["x"], w["y"]], dim=1))[:, 4:8])


NARROW: dict[Callable[[Model, Weights], None], int] = {
    computed_then_sliced: 12,
    through_several_steps: 12,
    in_place_on_an_intermediate: 12,
    two_slices_of_one: 12,
    transposed_and_sliced: 8,
    broadcast: 9,
    with_constants: 12,
    joined: 12,
    joined_columns: 16,
}
"""Elements that have to travel."""


@pytest.mark.parametrize("loader", NARROW)
def test_only_what_is_kept_travels(loader: Callable[[Model, Weights], None]) -> None:
    case = Case(loader)
    landings = case.recorded().landings
    staged = sum(prod(stage.shape) for stage in landings.stages)
    assert staged == NARROW[loader]
    assert sum(landing.piece.region.volume for landing in landings.landings) == staged
    assert not landings.excess
    assert differences(case) == []
    assert differences(case, seed=2) == []


def normalised_then_sliced(m: Model, w: Weights) -> None:
    """As BailingMoe's lm_head: every row depends on the others."""
    m.p.data[:2].copy_(torch.nn.functional.normalize(w["x"], dim=0)[:2])


def test_what_mixes_elements_is_named() -> None:
    case = Case(normalised_then_sliced)
    landings = case.recorded().landings
    assert differences(case) == []
    excess = landings.excess["p"]
    assert excess.nbytes == 12 * 4
    assert excess.names == ("x",)
    assert any("norm" in operation for operation in excess.operations)


def test_nothing_is_in_excess_where_all_is_kept() -> None:
    def loader(m: Model, w: Weights) -> None:
        m.p.data.copy_(torch.nn.functional.normalize(w["x"], dim=0))

    assert not Case(loader).recorded().landings.excess
