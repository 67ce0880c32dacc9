"""Through the map, or by vLLM's own loading: the same bytes, on every rank, there and back."""

from pathlib import Path

import pytest
from tests.engine.recording.breadth.tiny import make_tiny
from tests.engine.recording.conftest import Ranks
from tests.support.checkpoints import FAMILIES, Family, make_checkpoint

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed(
    packed: Ranks, checkpoints: dict[Family, Path], family: Family, tensor_parallel: int
) -> None:
    for report in packed.inspect(checkpoints[family], tensor_parallel):
        assert report.verified
        assert not report.differences
        assert report.basis == "checkpoint"
        assert not report.unused


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_plain(
    plain: Ranks, checkpoints: dict[Family, Path], family: Family, tensor_parallel: int
) -> None:
    for report in plain.inspect(checkpoints[family], tensor_parallel):
        assert report.verified
        assert not report.differences
        kinds = {
            place.parameter: place.kind for places in report.tensors.values() for place in places
        }
        repacked = {name for name, kind in kinds.items() if kind != "direct"}
        assert all("experts" in name for name in repacked), "only experts are packed here"


@pytest.mark.parametrize("vocab", [101, 250])
def test_padded_vocabulary(packed: Ranks, tmp_path: Path, vocab: int) -> None:
    model = make_checkpoint(tmp_path, "llama", seed=3, vocab=vocab)
    for report in packed.inspect(model, 2):
        assert report.verified
        assert not report.differences


def test_fewer_kv_heads_than_ranks_are_received_by_both(packed: Ranks, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama", seed=3)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('"num_key_value_heads": 2', '"num_key_value_heads": 1')
    )
    _halve_kv(tmp_path)
    reports = packed.inspect(model, 2)
    assert not any(report.differences for report in reports)
    key = "model.layers.0.self_attn.k_proj.weight"
    boxes = [place.boxes for report in reports for place in report.tensors[key]]
    assert boxes == [(((0, 0), (32, 128)),)] * 2


def _halve_kv(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {
        name: tensor[:32].contiguous() if ".k_proj" in name or ".v_proj" in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def test_expert_parallel_ranks_take_their_experts_only(
    packed: Ranks, checkpoints: dict[Family, Path]
) -> None:
    reports = packed.inspect(checkpoints["qwen3_moe"], 2, expert_parallel=True)
    assert not any(report.differences or report.uncovered for report in reports)
    experts = [{n for n in r.unused if ".experts." in n} for r in reports]
    assert experts[0].isdisjoint(experts[1])
    assert len(experts[0] | experts[1]) == 2 * 4 * 3


def test_experts_round_robin(packed: Ranks, tmp_path: Path) -> None:
    """Any expert map: the loader asks it, and so does its recording."""
    sizes = {"n_group": 2, "n_routed_experts": 8}
    make_tiny(tmp_path, "DeepseekV3ForCausalLM", sizes, {"topk_method": "noaux_tc"})
    options = {"expert_placement_strategy": "round_robin", "max_num_batched_tokens": 512}
    reports = packed.inspect(tmp_path, 2, expert_parallel=True, options=options)
    assert all(report.verified for report in reports)
    assert not any(report.differences for report in reports)
    taken = [
        sorted({int(n.split(".experts.")[1].split(".")[0]) for n in r.tensors if ".experts." in n})
        for r in reports
    ]
    assert taken == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_pipeline_stages_take_their_layers_only(
    packed: Ranks, checkpoints: dict[Family, Path]
) -> None:
    reports = packed.inspect(checkpoints["llama"], pipeline_parallel=2)
    assert not any(report.differences or report.uncovered for report in reports)
    assert not set(reports[0].unused) & set(reports[1].unused)


def test_tied_after_loading(packed: Ranks, tmp_path: Path) -> None:
    """The configuration ties, the checkpoint holds both, equal: vLLM ties by value."""
    from safetensors.torch import load_file, save_file

    model = make_checkpoint(tmp_path, "qwen2", seed=5)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    (report,) = packed.inspect(model)
    assert report.verified
    assert not report.differences
    assert "lm_head.weight" in report.tensors


def test_dummy_weights_are_proven_by_rehearsal(
    packed: Ranks, checkpoints: dict[Family, Path]
) -> None:
    for family in ("qwen2", "qwen3_moe"):
        (report,) = packed.inspect(checkpoints[family], options={"load_format": "dummy"})
        assert report.basis == "rehearsal"
        assert report.verified
        assert not report.differences
