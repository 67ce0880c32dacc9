"""The comparison can fail: every fault put into a rank shows, by the parameter's name."""

from pathlib import Path

import pytest
from tests.support.checkpoints import Family

from reshard_vllm.inspect.messages import Request
from reshard_vllm.inspect.ranks import RankPool

pytestmark = pytest.mark.engine


def test_sabotage_shows(tmp_path: Path, checkpoints: dict[Family, Path]) -> None:
    request = Request(
        str(checkpoints["qwen3_moe"]),
        options={"dtype": "bfloat16", "max_model_len": 128},
        codings=1,
    )
    dense = Request(str(checkpoints["llama"]), options=request.options, codings=1)
    worker = "tests.engine.recording.sabotaged"
    with RankPool(1, log=tmp_path / "log", worker=worker) as pool:
        reports = [pool.run(r, 240)[0] for r in (dense, dense, dense, request)]
    assert not any(report.error for report in reports)
    none, swapped, shifted, skipped = ("\n".join(r.differences) for r in reports)
    assert none == ""
    assert "layers.0.self_attn.o_proj" in swapped
    assert "layers.1.self_attn.o_proj" in swapped
    assert "layers.0.mlp.gate_up_proj" in shifted
    assert "layers.0.mlp.down_proj" not in shifted
    assert "experts.w13_weight" in skipped
