"""A real `vllm.LLM` in the trainer's own process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.vllm_server import CPU_ENVIRONMENT

ROOT = Path(__file__).parents[3]


@pytest.mark.engine
def test_an_llm_of_this_process_is_refitted(tmp_path: Path) -> None:
    module = "tests.multiprocess.trainer.in_process_script"
    ended = subprocess.run(
        [sys.executable, "-m", module, str(tmp_path / "model"), "2"],
        cwd=ROOT,
        env={**os.environ, **CPU_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"said"')]
    assert lines, ended.stdout[-3000:] + ended.stderr[-3000:]
    outcome = json.loads(lines[0])

    for said, version in zip(outcome["said"], ("1", "7"), strict=True):
        assert said["tokens"] == outcome["expected"]
        assert said["spans"] == [[version, 0, 8]]
        assert said["redundancy"] == 1.0
        assert len(said["received"]) == 2
