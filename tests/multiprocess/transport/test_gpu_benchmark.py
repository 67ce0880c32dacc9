"""The benchmark for GPUs: refuses without them, and moves the right bytes where it can run."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import main
from click.testing import CliRunner

pytestmark = pytest.mark.multiprocess

SMALL = ["--layers", "3", "--width", "64", "--refits", "2"]


def test_over_gloo(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    done = CliRunner().invoke(main, ["--device", "cpu", *SMALL, "--output", str(output)])
    assert done.exit_code == 0, done.output
    ranks = json.loads(output.read_text())["ranks"]
    assert [each["nbytes"] for each in ranks] == [0, 0, 3 * 64 * 32 * 2, 3 * 64 * 32 * 2]
    assert all(each["exact"] for each in ranks)


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="there are GPUs")
def test_without_gpus_nothing_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    done = CliRunner().invoke(main, [*SMALL, "--output", str(output)])
    assert done.exit_code == 1
    assert "needs 2 CUDA devices, found" in done.output
    assert not output.exists()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_over_nccl(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    done = CliRunner().invoke(main, [*SMALL, "--output", str(output)])
    assert done.exit_code == 0, done.output
