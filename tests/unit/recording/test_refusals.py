"""What a recording cannot follow is refused, and says what and why."""

from types import SimpleNamespace

import pytest
import torch
from tests.unit.recording.loaders import Case, Loader, Model

from reshard.errors import RecordingError
from reshard_vllm.recording.loader_map import layout_of

Weights = dict[str, torch.Tensor]


def kept_in_an_attribute(m: Model, w: Weights) -> None:
    m.derived = w["x"].clone()


def kept_in_a_list(m: Model, w: Weights) -> None:
    m.several = [w["x"], w["y"]]  # type: ignore[assignment]


def filled_attribute(m: Model, w: Weights) -> None:
    m.derived = torch.zeros(4, 6)
    m.derived.copy_(w["x"])


_ELSEWHERE = torch.zeros(4, 6)


def written_elsewhere(m: Model, w: Weights) -> None:
    _ELSEWHERE.copy_(w["x"])


def decided_by_a_value(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"] if bool((w["x"] > 0).all()) else w["y"])


def sized_by_values(m: Model, w: Weights) -> None:
    m.p.data[:, 0].copy_(w["x"][w["x"] > 0][:4])


def several_at_once(m: Model, w: Weights) -> None:
    torch._foreach_copy_([m.p.data, m.q.data], [w["x"], w["y"]])


def too_wide(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"].reshape(2, 12))


def given_other_storage(m: Model, w: Weights) -> None:
    m.p.data.set_(w["x"].untyped_storage())


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (kept_in_an_attribute, "outside of parameters and buffers\n  - derived"),
        (kept_in_a_list, "outside of parameters and buffers\n  - several"),
        (filled_attribute, "outside of parameters and buffers\n  - derived"),
        (written_elsewhere, r"writes \(4, 6\) elements that no parameter or buffer holds"),
        (decided_by_a_value, "Model: the loader decides by the values of weights"),
        (sized_by_values, "Model: the loader decides by the values of weights"),
        (several_at_once, "writes several tensors at once"),
        (too_wide, "Model's loader rejects the trainer's tensors: RuntimeError: .*size"),
        (given_other_storage, "gives a tensor other storage"),
    ],
)
def test_refused_as_a_whole(loader: Loader, text: str, device: str) -> None:
    with pytest.raises(RecordingError, match=text):
        Case(loader, device=device).recorded()


def from_the_constructor(m: Model, w: Weights) -> None:
    m.q.data.copy_(w["y"])
    m.p.data.add_(w["x"])


def computed_from_another(m: Model, w: Weights) -> None:
    m.p.data.copy_(w["x"])
    m.q.data.copy_(w["y"])
    m.q.data.copy_(m.p * m.q)


def read_as_another_dtype(m: Model, w: Weights) -> None:
    m.q.data.copy_(w["y"])
    m.p.data.copy_(w["x"].view(torch.int32))


def written_as_another_dtype(m: Model, w: Weights) -> None:
    m.p.data.view(torch.int32).copy_(w["x"])


def indexed_by_a_list(m: Model, w: Weights) -> None:
    """PyTorch makes the list a tensor on the device of the weights, where it has no data."""
    m.p.data[:2].copy_(w["x"][[0, 3]])


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("loader", "key", "text"),
    [
        (indexed_by_a_list, "p", "reads (2,) elements of unknown origin"),
        (from_the_constructor, "p", "computes with elements that it never loaded"),
        (computed_from_another, "q", "computes it from p"),
        (read_as_another_dtype, "p", "reads x, torch.float32, as torch.int32"),
        (written_as_another_dtype, "p", "written as torch.int32, it is torch.float32"),
    ],
)
def test_refused_by_name(loader: Loader, key: str, text: str, device: str) -> None:
    refused = Case(loader, device=device).recorded().landings.refused
    assert list(refused) == [key]
    assert text in refused[key]


def test_a_buffers_own_data_may_decide() -> None:
    """Expert maps are buffers that constructors fill."""

    def by_map(m: Model, w: Weights) -> None:
        for row in torch.nonzero(m.b[:, 0] == 0).flatten().tolist():
            m.p.data[row].copy_(w["x"][int(row)])

    recorded = Case(by_map, device="cpu").recorded()
    assert sum(landing.piece.region.volume for landing in recorded.landings.landings) == 24


def test_an_engine_that_moves_experts() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True))
    with pytest.raises(RecordingError, match="start the engine without --enable-eplb"):
        layout_of(config, ())
