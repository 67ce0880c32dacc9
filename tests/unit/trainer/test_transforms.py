import pytest
import torch
from tests.multiprocess.trainer.reading import read
from torch import nn

from reshard.board import Deadline
from reshard.errors import LayoutError
from reshard_trainer import ADD_ONE, ModuleSource, Part, Transform
from reshard_trainer.ensemble import Ensemble


class _Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3, bias=False, dtype=torch.bfloat16)
        self.linear = nn.Linear(3, 2)
        with torch.no_grad():
            self.norm.weight.copy_(torch.tensor([0.001, -0.25, 3.0]))


def test_one_is_added_in_fp32_before_any_cast() -> None:
    model = _Centred()
    source = ModuleSource(model, Ensemble.current(), transforms={"norm.*": ADD_ONE})
    for _ in range(2):
        source.prepare(Deadline.after(5))

    held = read(source)
    assert held["norm.weight"].dtype == torch.float32
    # In bfloat16 the first of these would be 1.
    assert torch.equal(held["norm.weight"], model.norm.weight.detach().float() + 1)
    assert torch.equal(held["linear.weight"], model.linear.weight.detach())


def test_present_values_count() -> None:
    model = _Centred()
    source = ModuleSource(model, Ensemble.current(), transforms={"norm.*": ADD_ONE})
    layout, moves = source.layout(), source.moves
    with torch.no_grad():
        model.norm.weight.fill_(2)
    source.refresh()
    source.prepare(Deadline.after(5))

    assert read(source)["norm.weight"].tolist() == [3.0, 3.0, 3.0]
    assert (source.layout(), source.moves) == (layout, moves)


def test_a_transform_that_is_not_elementwise() -> None:
    doubled = Transform(lambda values: values.repeat(2))
    source = ModuleSource(_Centred(), Ensemble.current(), transforms={"norm.*": doubled})

    with pytest.raises(LayoutError, match=r"of norm.weight makes \(6,\) of \(3,\)"):
        source.prepare(Deadline.after(5))


def test_two_transforms_for_one_tensor() -> None:
    with pytest.raises(LayoutError, match=r"has several transforms: \*\.weight, norm"):
        ModuleSource(
            _Centred(), Ensemble.current(), transforms={"norm.*": ADD_ONE, "*.weight": ADD_ONE}
        )


def test_a_pattern_that_fits_nothing() -> None:
    """One rank alone cannot say whether that is a mistake: all together can (test_kinds)."""
    given = {"gamma*": ADD_ONE, "norm*": ADD_ONE}
    source = ModuleSource(_Centred(), Ensemble.current(), transforms=given)

    assert source.unused == ("transforms: 'gamma*'",)


def test_a_part_beyond_the_whole() -> None:
    def parts(name: str, tensor: torch.Tensor) -> Part | None:
        return Part((3, 3), (2, 0)) if name == "linear.weight" else None

    with pytest.raises(LayoutError, match=r"linear.weight: a tensor of \(3, 3\) has no region"):
        ModuleSource(_Centred(), Ensemble.current(), parts=parts)
