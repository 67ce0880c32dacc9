from collections.abc import Callable

import pytest
import torch
from torch import nn

from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.sources import ModuleSource


class Odd(nn.Module):
    """0-d, empty, transposed, sliced, tied, persistent and other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.part = nn.Parameter(torch.arange(40.0).reshape(5, 8)[1:4, 2:6])
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor([1, 2, 3]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.ones(7), persistent=False)


def _read(source: ModuleSource, name: str) -> torch.Tensor:
    layout = {tensor.name: tensor for tensor in source.layout()}[FQN(name)]
    out = torch.full(layout.shape, -1, dtype=getattr(torch, layout.dtype))
    for region in layout.regions:
        for piece in source.table.cut(FQN(name), region):
            box = tuple(
                slice(o, o + n)
                for o, n in zip(piece.region.offset, piece.region.shape, strict=True)
            )
            out[box] = source.storage(piece.storage).as_strided(
                piece.view.shape, piece.view.stride, piece.view.offset
            )
    return out


def test_every_kind_of_plain_tensor_is_read_back() -> None:
    model = Odd()
    source = ModuleSource(model, Ensemble.current())

    state = model.state_dict()
    assert [tensor.name for tensor in source.layout()] == sorted(state)
    for name, tensor in state.items():
        assert torch.equal(_read(source, name), tensor), name
    assert all(not source.storage(name).requires_grad for name in state)


def test_tied_weights_are_offered_under_both_names_from_one_storage() -> None:
    source = ModuleSource(Odd(), Ensemble.current())

    embed, head = (source.storage(name) for name in ("embed.weight", "head.weight"))
    assert embed.data_ptr() == head.data_ptr()


def test_refresh_follows_values_and_new_storages() -> None:
    model = nn.Linear(2, 3, bias=False)
    source = ModuleSource(model, Ensemble.current())
    layout = source.layout()
    with torch.no_grad():
        model.weight.fill_(5)
    assert torch.equal(_read(source, "weight"), torch.full((3, 2), 5.0))

    model.weight.data = torch.full((3, 2), 6.0)
    source.refresh()

    assert torch.equal(_read(source, "weight"), torch.full((3, 2), 6.0))
    assert source.layout() == layout


def test_refresh_notices_another_layout() -> None:
    model = nn.Linear(2, 3, bias=False)
    source = ModuleSource(model, Ensemble.current())
    model.weight.data = torch.arange(6.0).reshape(2, 3).t()
    source.refresh()
    assert torch.equal(_read(source, "weight"), model.weight.data)

    model.bias = nn.Parameter(torch.zeros(3))
    source.refresh()

    assert [tensor.name for tensor in source.layout()] == ["bias", "weight"]


def test_a_compiled_checkpointed_model_has_checkpoint_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = sorted(model.state_dict())
    model[0] = checkpoint_wrapper(model[0])
    model[1] = torch.compile(model[1], backend="eager")  # type: ignore[assignment]

    source = ModuleSource(torch.compile(model, backend="eager"), Ensemble.current())  # type: ignore[arg-type]

    assert [tensor.name for tensor in source.layout()] == names


def _meta() -> nn.Module:
    return nn.Linear(2, 2, bias=False, device="meta")


def _sparse() -> nn.Module:
    model = nn.Module()
    model.register_buffer("weight", torch.eye(2).to_sparse())
    return model


class _Wrapped(torch.Tensor):
    pass


def _subclass() -> nn.Module:
    model = nn.Module()
    model.register_buffer("weight", torch.eye(2).as_subclass(_Wrapped))
    return model


def _quantised() -> nn.Module:
    model = nn.Module()
    model.register_buffer("weight", torch.zeros(2, dtype=torch.complex128))
    return model


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (_meta, "weight: on the meta device, without values; materialise it before attaching"),
        (_sparse, "weight: of layout torch.sparse_coo; only strided tensors can be published"),
        (_subclass, "weight: a _Wrapped; only plain tensors and DTensors are known"),
        (_quantised, "weight: unknown dtype 'torch.complex128'"),
    ],
)
def test_what_cannot_be_published_is_named(make: Callable[[], nn.Module], fault: str) -> None:
    with pytest.raises(LayoutError) as caught:
        ModuleSource(make(), Ensemble.current())

    assert "these weights cannot be published" in str(caught.value)
    assert [line.split("; known:")[0] for line in caught.value.faults] == [fault]
