"""Any sequence of the things that loaders do: what is recorded leaves the loader's own bits."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.recording.loaders import Case, Model, carried_out, same_bits

Weights = dict[str, torch.Tensor]
Step = Callable[[torch.Tensor, Weights], torch.Tensor]

MOVES: dict[str, Step] = {
    "take x": lambda t, w: w["x"],
    "take y": lambda t, w: w["y"],
    "flip rows": lambda t, w: t.flip(0),
    "swap halves": lambda t, w: torch.cat([t[2:], t[:2]]),
    "rows of both": lambda t, w: torch.cat([t[:2], w["y"][2:]]),
    "transpose": lambda t, w: t.t().reshape(4, 6),
    "clone": lambda t, w: t.clone(memory_format=torch.contiguous_format),
    "interleave": lambda t, w: t.reshape(4, 2, 3).transpose(1, 2).reshape(4, 6),
    "permute rows": lambda t, w: t[torch.tensor([2, 0, 3, 1])],
    "pad": lambda t, w: torch.nn.functional.pad(t[:, :5], (0, 1), value=0.5),
    "narrow": lambda t, w: t.to(torch.bfloat16),
    "widen": lambda t, w: t.to(torch.float64),
    "own buffer": lambda t, w: _through_a_buffer(t),
}
ARITHMETIC: dict[str, Step] = {
    "exp": lambda t, w: torch.exp(t.float().clamp(-3, 3)),
    "add y": lambda t, w: t + w["y"],
    "double in place": lambda t, w: t.mul_(2),
}


def _through_a_buffer(tensor: torch.Tensor) -> torch.Tensor:
    fused = torch.zeros(4, 6)
    fused[:, 1:] = tensor[:, :5]
    fused[:, 0] = tensor[:, 5]
    return fused


@dataclass(frozen=True)
class Sentence:
    """Steps, and where their result goes."""

    steps: tuple[str, ...]
    parameter: str
    rows: tuple[int, int]


sentences = st.builds(
    Sentence,
    st.lists(st.sampled_from([*MOVES, *ARITHMETIC]), max_size=4).map(tuple),
    st.sampled_from(["p", "q", "b"]),
    st.sampled_from([(0, 4), (0, 2), (2, 4), (1, 3), (3, 3)]),
)


@dataclass(frozen=True)
class Told:
    """A loader that does what sentences say."""

    sentences: tuple[Sentence, ...]

    def __call__(self, model: Model, weights: Weights) -> None:
        for sentence in self.sentences:
            tensor = weights["x"]
            for step in sentence.steps:
                tensor = {**MOVES, **ARITHMETIC}[step](tensor, weights)
            start, end = sentence.rows
            getattr(model, sentence.parameter).data[start:end].copy_(tensor[start:end])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(sentences, min_size=1, max_size=4).map(lambda s: Told(tuple(s))),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(["meta", "cpu"]),
)
def test_any_loader(loader: Told, source: torch.dtype, target: torch.dtype, device: str) -> None:
    case = Case(loader, source, target, device)
    recorded = case.recorded()
    assert recorded.landings.refused == {}
    checkpoint = case.checkpoint(3)
    found, wanted = carried_out(recorded, checkpoint), case.loaded(checkpoint)
    assert [name for name in wanted if not same_bits(found[name], wanted[name])] == []


def test_the_sentences_compute_too() -> None:
    """The property would hold for nothing if nothing were ever computed."""
    told = Told((Sentence(("exp",), "p", (0, 4)), Sentence(("flip rows",), "q", (0, 4))))
    landings = Case(told).recorded().landings
    assert list(landings.programs) == ["p"]
    assert any(landing.piece.storage == "q" for landing in landings.landings)


@pytest.mark.parametrize("step", [*MOVES])
def test_moves_are_not_computed(step: str) -> None:
    """Every rank would stage and replay what only moves; one lossy cast too many must compute."""
    told = Told((Sentence((step,), "p", (0, 4)),))
    programs = Case(told).recorded().landings.programs
    assert bool(programs) == (step == "narrow")
