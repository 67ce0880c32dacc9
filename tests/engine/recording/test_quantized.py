"""Quantised engines: refitted by tensors of their own format, else refused by name."""

from pathlib import Path

import pytest
from tests.engine.recording.conftest import Ranks
from tests.engine.recording.quantized import Method, make_quantized

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "fp8", "int4"])
def test_tensors_of_the_engines_own_format(packed: Ranks, tmp_path: Path, method: Method) -> None:
    """T16: loaded by movement alone, repacked afterwards; the step is repeated once a refit."""
    (report,) = packed.inspect(make_quantized(tmp_path, method))
    assert report.verified
    assert not report.differences
    kinds = {place.parameter: place.kind for places in report.tensors.values() for place in places}
    packed_name = {"compressed-tensors": "weight", "fp8": "weight", "int4": "weight_packed"}.get(
        method, "qweight"
    )
    assert kinds[f"model.layers.0.mlp.down_proj.{packed_name}"] == "repacked"
    assert kinds["model.norm.weight"] == "direct"
