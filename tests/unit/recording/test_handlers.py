"""Objects that hold packed weights stay, their contents change."""

from collections.abc import Callable

import torch

from reshard_vllm.install.handlers import held_by, keep


class _Handler:
    """As vLLM's: a pointer in a tensor."""

    def __init__(self, pointer: int) -> None:
        self.handler_tensor = torch.tensor(pointer)


def _packed(handler: _Handler, weight: torch.Tensor, rows: int) -> Callable[[], tuple[int, int]]:
    return lambda: (int(handler.handler_tensor), int(weight.sum()) + rows)


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.handler = _Handler(1)
        self.packed = _packed(_Handler(2), torch.ones(3), 0)

    def step(self, rows: int = 0) -> tuple[_Handler, object]:
        """A post-load step: everything is new."""
        fresh = _Handler(10)
        self.handler = fresh
        self.packed = _packed(_Handler(20), torch.full((3,), 2.0), rows)
        return fresh, self.packed


def test_objects_stay_and_contents_change() -> None:
    layer = _Layer()
    handler, packed = layer.handler, layer.packed
    held = held_by(layer)
    fresh, _ = layer.step()
    keep(held)
    assert layer.handler is handler
    assert layer.packed is packed
    assert int(handler.handler_tensor) == 10
    assert packed() == (20, 6)
    assert int(fresh.handler_tensor) == 1, "the new object releases the old contents"


def test_what_does_not_fit_is_left_whole() -> None:
    layer = _Layer()
    held = held_by(layer)
    _, packed = layer.step(rows=5)
    keep(held)
    assert layer.packed is packed, "it closes over another number: the old one cannot stand for it"
    assert layer.packed() == (20, 11)
