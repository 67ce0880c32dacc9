"""One live case: a live engine taken from A to B and back, and cold engines on A and B."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tests.engine.recording.breadth.tiny import make_tiny
from tests.engine.recording.live.cases import LiveCase
from tests.engine.recording.live.process import LiveRequest
from tests.support.checkpoints import make_tokenizer
from tests.support.cold import ColdHost, Request

_STAND_INS: Final = Path(__file__).parents[1] / "breadth" / "stand_ins"
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(_STAND_INS), os.environ.get("PYTHONPATH")))),
}
_PROCESSOR: Final = {"image_processor_type": "Qwen2VLImageProcessor"}
PROMPTS: Final = (tuple(range(20, 60)), (90, 33, 71, 20, 64), (50,) * 9)
"""Below every vocabulary, and beside the ids of images."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case.

    Attributes:
        faults: what differs; empty if the engine was, bit for bit, a cold one each time.
        largest: difference of a prompt's log-probability, over both refits.
        moved: largest difference between A's and B's: how much there was to see.
        reports: of the two refits.
    """

    faults: tuple[str, ...]
    largest: float
    moved: float
    reports: tuple[Mapping[str, Any], ...]


class Hosts:
    """Two processes.

    Attributes:
        live: starts engines that can be refitted.
        cold: starts engines, and knows nothing of reshard.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.live = ColdHost(
            {**_ENVIRONMENT, "VLLM_PLUGINS": "reshard"},
            folder / "live.log",
            "tests.engine.recording.live.process",
        )
        self.cold = ColdHost(_ENVIRONMENT, folder / "cold.log")

    def run(self, case: LiveCase) -> Outcome:
        """Take an engine from A to B (staged) and back to A (in place)."""
        a, b = (checkpoint(self._folder / case.name / seed, case, seed) for seed in ("a", "b"))
        common: dict[str, Any] = {
            "tensor_parallel": case.tensor_parallel,
            "dtype": "bfloat16",
            "prompts": PROMPTS,
            "options": {
                "skip_tokenizer_init": case.configuration.kind != "multimodal",
                "max_num_batched_tokens": 512,
                **case.configuration.options,
                **case.options,
            },
        }
        request = LiveRequest(
            str(a), published=(str(b), str(a)), bucket_bytes=case.bucket_bytes, **common
        )
        try:
            live = self.live.load(request)
            cold_a, cold_b = (self.cold.load(Request(str(folder), **common)) for folder in (a, b))
        finally:
            shutil.rmtree(self._folder / case.name)
        said: Any = live["said"]
        wanted = {"started on A": cold_a, "refitted to B": cold_b, "back on A": cold_a}
        faults = [
            f"{when}: {what} differ"
            for (when, cold), answer in zip(wanted.items(), said, strict=True)
            for what in cold
            if answer[what] != cold[what]
        ]
        largest = max(_distance(said[1], cold_b), _distance(said[2], cold_a))
        reports: Any = live["reports"]
        return Outcome(tuple(faults), largest, _distance(cold_a, cold_b), tuple(reports))

    def close(self) -> None:
        """End both."""
        self.live.close()
        self.cold.close()


def checkpoint(folder: Path, case: LiveCase, seed: str) -> Path:
    """A tiny random checkpoint: every value depends on the seed."""
    folder.mkdir(parents=True)
    of = case.configuration
    overrides = {**of.overrides, **case.overrides}
    make_tiny(folder, of.model_class, overrides, of.edits, of.renames)
    if of.kind == "multimodal":  # an engine makes the processor, though no prompt has an image
        make_tokenizer().save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(ord(seed))
    tensors = {
        name: _random(name, tensor, generator) for name, tensor in sorted(load_file(path).items())
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _random(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    centre = 1.0 if "norm" in name and tensor.ndim == 1 else 0.0
    noise = torch.randn(tensor.shape, generator=generator)
    return (centre + 0.08 * noise).to(tensor.dtype)


def _distance(answer: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    distances: list[float] = [
        abs(x - y)
        for mine, theirs in zip(
            answer["log_probabilities"], other["log_probabilities"], strict=True
        )
        for x, y in zip(mine, theirs, strict=True)
    ]
    return max(distances)
