"""Script of `test_refusals.py`: prints what each refusal says, as one JSON line."""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[3]))
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
}

import torch
from safetensors.torch import load_file, save_file
from tests.engine.recording.quantized import make_quantized
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from reshard.errors import RecordingError
from reshard.session import TensorSpec
from reshard_vllm.inspect import loading
from reshard_vllm.inspect.messages import Option, Request
from reshard_vllm.inspect.rank import write
from reshard_vllm.install import checkpoint
from reshard_vllm.install.classes import find_faults
from reshard_vllm.install.installer import VllmInstaller
from reshard_vllm.install.proof import prove
from reshard_vllm.recording import loader_map
from reshard_vllm.recording.loader_map import layout_of


def main(model_dir: Path, rendezvous: str) -> None:
    """Run all refusals on one rank."""
    config = _config(model_dir)
    importlib.import_module(config.parallel_config.worker_cls.rpartition(".")[0])
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    said: dict[str, str] = {}
    model = loading.load(config)
    names = dict(config.compilation_config.static_forward_context)
    rotary = dict(_ROPE_DICT)
    before = {name: id(p) for name, p in model.named_parameters()}
    specs = checkpoint.specs(config, model)
    proof = prove(model, config)

    wrong_name = (TensorSpec("model.layers.0.attention.wq.weight", (128, 128), "float32"),)
    said["unknown name"] = _refusal(config, wrong_name)
    shrunk = tuple(TensorSpec(s.name, tuple(n // 2 for n in s.shape), s.dtype) for s in specs)
    said["wrong shape"] = _refusal(config, shrunk)
    some = tuple(s for s in specs if "layers.0.self_attn.k_proj" not in s.name)
    faults = find_faults(layout_of(config, some), proof, model)
    said["missing"] = "\n".join(faults.lines())

    said["layer names"] = _same(names, config.compilation_config.static_forward_context)
    said["rotary"] = _same(rotary, _ROPE_DICT)
    said["parameters"] = _same(before, {name: id(p) for name, p in model.named_parameters()})
    said["order"] = (
        "checkpoint" if proof.in_order(tuple(reversed(specs))) == specs else "the trainer's"
    )
    said["online"] = _online()
    said |= _tied(model_dir)
    said["unquantised"] = _unquantised(make_quantized(_folder(rendezvous, "awq"), "awq"), specs)
    print(json.dumps(said))


def _config(model_dir: Path) -> VllmConfig:
    options: dict[str, Option] = {"dtype": "bfloat16", "max_model_len": 128}
    return loading.config_of(Request(str(model_dir), options=options), 0)


def _refusal(config: VllmConfig, specs: tuple[TensorSpec, ...]) -> str:
    try:
        layout_of(config, specs)
    except RecordingError as error:
        return str(error)
    return ""


def _same(first: object, second: object) -> str:
    return "restored" if first == second else "changed"


def _online() -> str:
    """A stand-in: no CPU has the kernels that such layers need to load."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].quant_method = SimpleNamespace(uses_meta_device=True)  # type: ignore[assignment]
    try:
        loader_map.refuse_online_quantization(model)
    except RecordingError as error:
        return str(error)
    return ""


def _unquantised(model_dir: Path, specs: tuple[TensorSpec, ...]) -> str:
    config = _config(model_dir)
    model = loading.load(config)
    proof = prove(model, config)
    try:
        recorded = layout_of(config, specs)
    except RecordingError as error:
        return str(error)
    return "\n".join(find_faults(recorded, proof, model).lines())


def _tied(model_dir: Path) -> dict[str, str]:
    folder = _folder(str(model_dir), "tied")
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(plain))
    config = _config(folder)
    model = loading.load(config)
    specs = checkpoint.specs(config, model)
    proof = prove(model, config)
    recorded = layout_of(config, specs)
    installer = VllmInstaller(model, config, recorded, proof, specs, install="staged")
    before = model.model.embed_tokens.weight.detach().clone()  # type: ignore[union-attr, operator]
    given = {name: t + 1 if name == "lm_head.weight" else t for name, t in tensors.items()}
    try:
        write(installer, given.items())
    except RecordingError as error:
        after = model.model.embed_tokens.weight  # type: ignore[union-attr]
        untouched = torch.equal(before, after)  # type: ignore[arg-type]
        return {"tied": str(error), "tied, live": "untouched" if untouched else "changed"}
    return {"tied": "", "tied, live": ""}


def _folder(beside: str, name: str) -> Path:
    folder = Path(f"{beside}-{name}")
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
