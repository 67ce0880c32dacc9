"""A real `vllm.LLM` in the trainer's own process."""

import json
import sys
from pathlib import Path

import pytest
from tests.support.processes import started, wait_until
from tests.support.vllm_server import CPU_ENVIRONMENT

ROOT = Path(__file__).parents[3]


@pytest.mark.engine
def test_an_llm_of_this_process_is_refitted(tmp_path: Path) -> None:
    module = "tests.multiprocess.trainer.in_process_script"
    command = [sys.executable, "-m", module, str(tmp_path / "model"), "2"]
    env = {**CPU_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with started(command, log=tmp_path / "log", env=env) as tree:
        wait_until(lambda: tree.process.poll() is not None, 400)
        log = tree.log.read_text(errors="replace")
    lines = [line for line in log.splitlines() if line.startswith('{"said"')]
    assert lines, log[-6000:]
    outcome = json.loads(lines[0])

    for said, version in zip(outcome["said"], ("1", "7"), strict=True):
        assert said["tokens"] == outcome["expected"]
        assert said["spans"] == [[version, 0, 8]]
        assert said["redundancy"] == 1.0
        assert len(said["received"]) == 2
