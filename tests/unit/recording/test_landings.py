"""What loaders do to tensors, one trick a test: the record, replayed on real data, gives the same.

The trap that a test is about is named as in docs/recording.md.
"""

import pytest
import torch
from tests.unit.recording.stand_in import Loader, loaded, record, replayed, same

Tensors = dict[str, torch.Tensor]


def _values(**shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _meta(**shapes: tuple[int, ...]) -> Tensors:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def _check(loader: Loader, parameters: Tensors, checkpoint: Tensors) -> None:
    found = record(loader, parameters, checkpoint)
    assert not found.refused
    wanted = loaded(loader, parameters, checkpoint)
    assert same(replayed(found, parameters, checkpoint), wanted)


def test_fused_slices_of_a_rank() -> None:
    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        for at, name in enumerate(("q", "k")):
            parameters["qk"].narrow(0, 2 * at, 2).copy_(checkpoint[name].narrow(0, 2, 2))

    _check(load, _meta(qk=(4, 3)), _values(q=(4, 3), k=(4, 3)))


def test_transposed() -> None:
    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["w"].copy_(checkpoint["w"].t()[1:])

    _check(load, _meta(w=(4, 3)), _values(w=(3, 5)))


@pytest.mark.parametrize("how", ["clone", "cat", "index", "stack"])
def test_movement_that_is_no_view(how: str) -> None:
    """T9."""

    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        a, b = checkpoint["a"], checkpoint["b"]
        moved = {
            "clone": lambda: a.view(2, 2, 3).transpose(0, 1).contiguous().view(4, 3),
            "cat": lambda: torch.cat((b[1:3], a[:2])),
            "index": lambda: a[torch.tensor([3, 0, 2, 1])],
            "stack": lambda: torch.stack((a[0], b[0], a[1], b[1])),
        }[how]()
        parameters["w"].copy_(moved)

    _check(load, _meta(w=(4, 3)), _values(a=(4, 3), b=(4, 3)))


def test_casts_keep_both_dtypes() -> None:
    """T10: a byte copy would be wrong."""

    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["gate"].copy_(checkpoint["gate"])

    checkpoint = {"gate": _values(gate=(4,))["gate"].bfloat16()}
    (landing,) = record(load, _meta(gate=(4,)), checkpoint).landings
    assert landing.dtype == torch.float32
    _check(load, _meta(gate=(4,)), checkpoint)


def test_a_lossy_cast_on_the_way_is_computed() -> None:
    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["w"].copy_(checkpoint["w"].to(torch.bfloat16))

    checkpoint = _values(w=(8,))
    found = record(load, _meta(w=(8,)), checkpoint)
    assert found.programs["w"]
    _check(load, _meta(w=(8,)), checkpoint)


def test_padding_is_a_constant() -> None:
    """T11."""

    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["e"][:3].copy_(checkpoint["e"])
        parameters["e"][3:].fill_(0)

    found = record(load, _meta(e=(4, 2)), _values(e=(3, 2)))
    assert len(found.constants["e"]) == 1
    _check(load, _meta(e=(4, 2)), _values(e=(3, 2)))


def test_a_missing_bias_made_of_zeros_is_a_constant() -> None:
    """T11: Whisper's key projection."""

    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["b"][:2].copy_(checkpoint["q"])
        parameters["b"][2:].copy_(torch.zeros(2))

    _check(load, _meta(b=(4,)), _values(q=(2,)))


def test_arithmetic_is_replayed_in_order() -> None:
    """T3: copied, then transformed in place, as Mamba2's A."""

    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        a = parameters["a"]
        a.copy_(checkpoint["a_log"][2:4])
        a.copy_(-torch.exp(a.float()))

    _check(load, _meta(a=(2,)), _values(a_log=(4,)))


def test_arithmetic_on_the_checkpoint_stages_what_it_reads() -> None:
    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["w"].copy_(torch.nn.functional.normalize(checkpoint["w"])[:2])

    found = record(load, _meta(w=(2, 4)), _values(w=(4, 4)))
    assert [stage.shape for stage in found.stages]
    _check(load, _meta(w=(2, 4)), _values(w=(4, 4)))


def test_live_parameters_are_not_touched() -> None:
    """T3: recorded on real memory, the write is noted and not done."""

    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["w"].copy_(checkpoint["w"])
        parameters["w"].fill_(2)

    live = {"w": torch.ones(3)}
    record(load, live, _values(w=(3,)))
    assert live["w"].tolist() == [1, 1, 1]


def test_a_tie_by_copy_is_followed() -> None:
    """T12: BERT's decoder takes the embedding's rows, and its padding stays out."""

    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["embedding"][:3].copy_(checkpoint["embedding"])
        parameters["embedding"][3:].fill_(0)
        parameters["decoder"].copy_(parameters["embedding"][:3])

    shapes = {"embedding": (4, 2), "decoder": (3, 2)}
    found = record(load, _meta(**shapes), _values(embedding=(3, 2)))
    assert {x.piece.storage for x in found.landings} == {"embedding", "decoder"}
    _check(load, _meta(**shapes), _values(embedding=(3, 2)))


def test_what_depends_on_another_parameter_is_refused_by_name() -> None:
    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["a"].copy_(checkpoint["a"])
        parameters["b"].copy_(parameters["a"] * 2)

    found = record(load, _meta(a=(2,), b=(2,)), _values(a=(2,)))
    assert found.refused == {"b": "the loader computes it from a"}


@pytest.mark.parametrize("real", [False, True])
def test_shapes_are_checked(real: bool) -> None:
    """T8: the loader itself would raise."""

    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["w"].copy_(checkpoint["w"])

    parameters = {"w": torch.zeros(4, 3)} if real else _meta(w=(4, 3))
    with pytest.raises(RuntimeError, match="size"):
        record(load, parameters, _values(w=(3, 4)))


def test_code_that_follows_the_parameters_device_keeps_its_data() -> None:
    """T5: indices moved to the parameter's device, then looked at."""

    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        kept = torch.tensor([-1, 0, -1, 1])
        experts = (kept >= 0).nonzero().flatten().to(parameters["w"].device)
        for at, expert in enumerate(experts.tolist()):
            parameters["w"][at].copy_(checkpoint["w"][expert])

    _check(load, _meta(w=(2, 3)), _values(w=(4, 3)))


def test_arithmetic_on_what_was_never_loaded_is_refused_by_name() -> None:
    """A constructor's values are not there when a program is replayed."""

    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["w"].mul_(checkpoint["w"])

    found = record(load, {"w": torch.ones(3)}, _values(w=(3,)))
    assert found.refused == {"w": "the loader computes with elements that it never loaded"}


def test_a_silent_loader_lands_nothing() -> None:
    """T7: names returned as loaded prove nothing; no byte moves."""

    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        """Returns, as vLLM's loader of a repacked layer does."""

    found = record(load, _meta(w=(3,)), _values(w=(3,)))
    assert not found.landings
    assert not found.constants


def test_the_comparison_can_fail() -> None:
    """A record of another loader does not give this loader's values."""

    def load(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["w"].copy_(checkpoint["w"])

    def flipped(parameters: Tensors, checkpoint: Tensors) -> None:
        parameters["w"].copy_(checkpoint["w"].flip(0))

    checkpoint = _values(w=(3,))
    found = record(flipped, _meta(w=(3,)), checkpoint)
    wanted = loaded(load, _meta(w=(3,)), checkpoint)
    assert not same(replayed(found, _meta(w=(3,)), checkpoint), wanted)
