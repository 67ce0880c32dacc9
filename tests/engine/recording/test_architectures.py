"""A short run of `make breadth`: one configuration of each kind, as its documented table has it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.recording.breadth.cases import CASES
from tests.engine.recording.breadth.harness import TABLE, Pools, run

pytestmark = pytest.mark.engine

SAMPLE = {
    "GPT2LMHeadModel": "transposed checkpoint",
    "Falcon, new decoder": "grouped qkv",
    "DeepseekV2ForCausalLM": "MLA and experts",
    "GptOssForCausalLM": "interleaved, transposed experts with biases",
    "MambaForCausalLM": "state space, with arithmetic in its loader",
    "Lfm2ForCausalLM": "hybrid",
    "BertModel": "encoder",
    "LlavaForConditionalGeneration": "vision and language",
    "PhiForCausalLM": "Transformers backend",
}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    opened = Pools()
    yield opened
    opened.close()


def documented(name: str) -> list[str]:
    """The marks at TP 1, TP 2, EP 2 and PP 2."""
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in rows[0].split("|")[-5:-1]]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_configuration_is_refitted_as_documented(
    name: str, pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engine.recording.breadth.harness.FOLDER", tmp_path)
    (case,) = (case for case in CASES if case.name == name)
    found = run(case, pools, ["tp1", "tp2", "ep2"])
    states = {layout: outcome.state for layout, outcome in found.outcomes.items()}
    reasons = [outcome.reason for outcome in found.outcomes.values()]
    assert set(states.values()) == {"identical"}, reasons
    marks = dict(zip(("tp1", "tp2", "ep2", "pp2"), documented(name), strict=True))
    assert {layout: marks[layout] for layout in states} == dict.fromkeys(states, "=")
