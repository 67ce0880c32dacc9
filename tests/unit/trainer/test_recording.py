"""An adapter's record against the adapter itself, run on numbers."""

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError
from reshard_trainer.sources.recording import Adapter, record

State = dict[str, torch.Tensor]

SHAPES = {"a": (6, 4), "b": (3, 4, 5), "bias": (8,), "scalar": ()}


def _numbered() -> State:
    state, start = {}, 0
    for name, shape in SHAPES.items():
        count = torch.Size(shape).numel()
        state[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return state


def _check(adapter: Adapter) -> None:
    adapted = record(adapter, {name: (shape, torch.float32) for name, shape in SHAPES.items()})
    values = _numbered()
    real = adapter(dict(values))
    assert adapted.keys() == real.keys()
    for name, tensor in adapted.items():
        built = torch.full(tensor.shape, -1.0)
        for source, same in tensor.origins:
            stored = same.stored
            place = same.canonical
            built.as_strided(place.shape, place.stride, place.offset).copy_(
                values[source].as_strided(stored.shape, stored.stride, stored.offset)
            )
        assert torch.equal(built, real[name]), name


def _views(s: State) -> State:
    return {"x": s["b"][1:, ::2].permute(2, 0, 1), "y": s["a"].view(6, 2, 2).permute(1, 2, 0), **s}


def _copies(s: State) -> State:
    turned = s["b"].transpose(0, 2).contiguous()
    return {"x": turned.view(-1), "y": turned[1:4, 1], "z": s["a"].t().clone().t().reshape(2, 12)}


def _joins(s: State) -> State:
    both = torch.cat([s["a"], s["b"][:, :, 0], s["a"][2:4]])
    return {"x": both, "y": torch.stack([both[1], both[7]], 1), "z": both[4:8].chunk(2, 1)[1]}


def _picks(s: State) -> State:
    order = torch.tensor([5, 0, 0, 3])
    mask = torch.tensor([True, False, True, True, False, True])
    return {
        "x": s["a"][order],
        "y": s["a"].index_select(1, torch.tensor([3, 1])),
        "z": s["a"][mask].flip(0),
        "w": s["b"].roll(1, 2),
        "repeated": s["bias"].repeat_interleave(2, 0),
        "tiled": s["bias"].repeat(3),
        "expanded": s["a"][:2, None].expand(2, 3, 4).reshape(6, 4),
    }


def _fills(s: State) -> State:
    out = torch.empty(6, 4)
    out[::2] = s["a"][:3]
    out[1::2] = s["a"][3:]
    out[1:3, 1:] = s["b"][0, :2, :3]
    like = torch.empty_like(s["a"])
    like.copy_(s["a"].flip(1))
    return {"x": out, "y": like, "z": s["scalar"].reshape(1)}


@pytest.mark.parametrize("adapter", [_views, _copies, _joins, _picks, _fills])
def test_a_record_says_where_each_element_comes_from(adapter: Adapter) -> None:
    _check(adapter)


_STEPS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.flip(0),
    lambda t: t[1:],
    lambda t: t.transpose(0, -1),
    lambda t: t.contiguous(),
    lambda t: t.reshape(-1),
    lambda t: t.reshape(2, -1) if t.numel() % 2 == 0 else t,
    lambda t: torch.cat([t, t]),
    lambda t: torch.stack([t, t], -1),
    lambda t: t[torch.arange(t.shape[0]).flip(0)],
    lambda t: t[..., ::2],
]


@given(st.lists(st.sampled_from(range(len(_STEPS))), max_size=5), st.sampled_from(["a", "b"]))
def test_any_chain_of_moves_is_followed(steps: list[int], name: str) -> None:
    def adapter(state: State) -> State:
        tensor = state[name]
        for step in steps:
            tensor = _STEPS[step](tensor)
        return {"x": tensor}

    _check(adapter)


def _computing(s: State) -> State:
    return {
        "scaled": s["a"] * 2,
        "joined": torch.cat([s["a"], s["a"] + 1]),
        "cast": s["bias"].to(torch.bfloat16),
        "bits": s["bias"].view(torch.int32),
        "made up": torch.zeros(3),
        "padded": torch.cat([s["a"], torch.zeros(2, 4)]),
        "well": s["a"][1:],
    }


def test_all_that_is_not_movement_is_refused_by_name() -> None:
    with pytest.raises(LayoutError) as caught:
        record(_computing, {name: (shape, torch.float32) for name, shape in SHAPES.items()})

    faults = dict(fault.split(": ", 1) for fault in caught.value.faults)
    assert faults == {
        "scaled": "computed by aten.mul.Tensor from a; an adapter moves elements, and no more",
        "joined": "computed by aten.add.Tensor from a; an adapter moves elements, and no more",
        "cast": "cast from torch.float32 to torch.bfloat16; leave casts out, the sender casts to "
        "what the engine wants",
        "bits": "computed by aten.view.dtype from bias; an adapter moves elements, and no more",
        "made up": "3 of its elements are not the trainer's",
        "padded": "8 of its elements are not the trainer's",
    }


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        (lambda s: {"a": s["a"].add_(1)}, "writes into a, a weight of the trainer"),
        (lambda s: {"a": s["a"] if s["a"].sum() > 0 else s["b"]}, "tensors without values"),
        (lambda s: {"a": s["missing"]}, "KeyError: 'missing'"),
    ],
)
def test_an_adapter_that_cannot_be_run_without_values(
    adapter: Callable[[State], Mapping[str, torch.Tensor]], text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        record(adapter, {name: (shape, torch.float32) for name, shape in SHAPES.items()})
