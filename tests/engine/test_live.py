"""A live engine goes from checkpoint A to B and back: each time it says what a cold one says.

A few of the kinds that `make live` runs, in the same way: its table is docs/live.md.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.recording.live.cases import LIVE, LiveCase
from tests.engine.recording.live.hosts import PROMPTS, Hosts
from tests.engine.recording.live.process import LiveRequest
from tests.support.checkpoints import HIDDEN, make_checkpoint
from tests.support.cold import Request

pytestmark = pytest.mark.engine

EMBED: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two processes, shared by all cases."""
    made = Hosts(tmp_path_factory.mktemp("live"))
    yield made
    made.close()


@pytest.mark.parametrize("case", [c for c in LIVE if c.in_suite], ids=lambda c: c.name)
def test_there_and_back(hosts: Hosts, case: LiveCase) -> None:
    outcome = hosts.run(case)
    assert outcome.faults == ()
    assert outcome.largest == 0.0
    assert outcome.moved > 0.1, "A and B must differ for this to show anything"
    assert all(report["redundancy"] == 1.0 for report in outcome.reports)


def test_tied_embeddings_and_padding_as_the_trainer_has_them(hosts: Hosts, tmp_path: Path) -> None:
    """Embedding only, both, output only; 101 rows, or padded to 104 with rows of NaN; two ranks.

    The engine pads to 128; what a trainer's padding holds must never arrive.
    """
    a, b = (make_checkpoint(tmp_path / str(seed), "qwen2", seed=seed, vocab=101) for seed in (1, 2))
    published = (
        _published(tmp_path / "1st", b, (EMBED,), rows=104),
        _published(tmp_path / "2nd", a, (EMBED, HEAD)),
        _published(tmp_path / "3rd", b, (HEAD,)),
        _published(tmp_path / "4th", a, (HEAD,), rows=104),
    )
    common: dict[str, Any] = {
        "tensor_parallel": 2,
        "dtype": "bfloat16",
        "prompts": PROMPTS,
        "options": {"skip_tokenizer_init": True},
    }
    live: Any = hosts.live.load(LiveRequest(str(a), published=tuple(map(str, published)), **common))
    cold = {folder: hosts.cold.load(Request(str(folder), **common)) for folder in (a, b)}
    for answer, folder in zip(live["said"], (a, b, a, b, a), strict=True):
        for what in ("checksums", "tokens", "log_probabilities"):
            assert answer[what] == cold[folder][what]
    notes = ["\n".join(report["notes"]) for report in live["reports"]]
    assert "rows 101 to 103 are taken for padding" in notes[0]
    assert notes[1] == ""
    assert f"{EMBED}: tied, and published as {HEAD}" in notes[2]


def test_a_draft_model_is_refitted_where_it_shares_and_named_where_not(
    hosts: Hosts, tmp_path: Path
) -> None:
    """EAGLE: embedding and output are the target's own modules; the draft's layers are its own."""
    a, b = (make_checkpoint(tmp_path / str(seed), "llama", seed=seed) for seed in (1, 2))
    draft = _eagle(make_checkpoint(tmp_path / "draft", "llama", seed=3))
    speculative = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}
    common: dict[str, Any] = {"tensor_parallel": 1, "dtype": "bfloat16", "prompts": PROMPTS}
    live: Any = hosts.live.load(
        LiveRequest(
            str(a),
            published=(str(b),),
            options={"skip_tokenizer_init": True, "speculative_config": speculative},
            **common,
        )
    )
    cold = hosts.cold.load(Request(str(b), options={"skip_tokenizer_init": True}, **common))
    before, after = (said["draft"] for said in live["said"])
    assert live["said"][1]["log_probabilities"] == cold["log_probabilities"]
    assert any("embed_tokens" in name for name in before["shared"])
    assert all(before["shared"][name] != after["shared"][name] for name in before["shared"])
    assert before["own"] == after["own"]
    (note,) = live["reports"][0]["notes"]
    assert note.startswith(f"draft model {draft} (eagle): stays at the weights")


def _eagle(folder: Path) -> Path:
    """A Llama's first layer as the draft that EAGLE trains: it takes embedding and hidden state."""
    path = folder / "model.safetensors"
    kept = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(path).items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    kept["fc.weight"] = 0.08 * torch.randn(HIDDEN, 2 * HIDDEN)
    save_file(kept, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _published(folder: Path, checkpoint: Path, names: tuple[str, ...], rows: int = 101) -> Path:
    """What a trainer with these names for its tied embedding, and so many rows, would publish."""
    folder.mkdir()
    tensors = load_file(checkpoint / "model.safetensors")
    embedding = tensors.pop(EMBED)
    assert HEAD not in tensors
    padded = torch.cat([embedding, torch.full((rows - 101, embedding.shape[1]), torch.nan)])
    tensors |= {name: padded.clone() for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
