"""ZeRO-3's intervals, on stand-ins with the attributes of DeepSpeed's parameters."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from reshard.errors import LayoutError
from reshard.ids import TrainerRank
from reshard_trainer.ensemble import Ensemble, GlobalRank
from reshard_trainer.sources import ModuleSource

_THIRD_OF_FOUR = Ensemble(TrainerRank(2), tuple(map(GlobalRank, range(4))))


@dataclass
class _Status:
    name: str


def _stand_in(part: torch.Tensor | None) -> nn.Module:
    """Stand-in for a ZeRO-3 parameter of [5, 3]: 15 elements are 4 a rank, the last one padded."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(0))
    for name, value in {
        "ds_id": 0,
        "ds_shape": torch.Size([5, 3]),
        "ds_numel": 15,
        "ds_tensor": part,
    }.items():
        setattr(model.weight, name, value)
    return model


def test_an_interval_is_the_rows_and_the_parts_of_rows_that_it_holds() -> None:
    source = ModuleSource(_stand_in(torch.arange(8.0, 12.0)), _THIRD_OF_FOUR)

    (tensor,) = source.layout()
    assert tensor.shape == (5, 3)
    # Elements 8 to 11: the end of row 2, and all of row 3.
    assert [str(region) for region in tensor.regions] == ["[2:3, 2:3]", "[3:4, 0:3]"]


def _on_nvme() -> torch.Tensor:
    part = torch.empty(4)
    part.status = _Status("NOT_AVAILABLE")  # type: ignore[attr-defined]
    return part


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (None, "ZeRO-3 has not partitioned it yet; attach after deepspeed.initialize"),
        (_on_nvme(), "ZeRO-3 keeps it on NVMe; only parameters in memory can be published"),
        (torch.empty(5), r"of shape \(5,\); 15 elements over 4 ranks are 4 for each"),
    ],
)
def test_an_interval_that_is_not_there(part: torch.Tensor | None, text: str) -> None:
    with pytest.raises(LayoutError, match=f"weight: .*{text}"):
        ModuleSource(_stand_in(part), _THIRD_OF_FOUR)
