"""Which engines are refitted live: one of each way in which checkpoints and engines differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.engine.recording.breadth.cases import CASES
from tests.engine.recording.breadth.cases import Case as Configuration

_CONFIGURATIONS: Final = {case.name: case for case in CASES}


@dataclass(frozen=True, slots=True)
class LiveCase:
    """One engine.

    Attributes:
        shows: what its layout is an example of.
        name: of the configuration in `breadth/cases.py`.
        overrides: of it, where an engine wants other sizes than a model that is only loaded.
        tensor_parallel: engine ranks.
        options: further arguments of the engine.
        bucket_bytes: largest message of a refit.
        in_suite: whether the test suite runs it too.
    """

    shows: str
    name: str
    tensor_parallel: int = 1
    overrides: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    bucket_bytes: int = 16 * 2**20
    in_suite: bool = False

    @property
    def configuration(self) -> Configuration:
        """What is built."""
        return _CONFIGURATIONS[self.name]


_MLA: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""The only sizes that vLLM's attention of this kind has kernels for."""

# No expert parallel: vLLM's CPU kernel of experts ends in a segmentation fault there.
LIVE: Final = (
    LiveCase("dense", "LlamaForCausalLM"),
    LiveCase("fused qkv in the checkpoint", "Phi3ForCausalLM", 2),
    LiveCase("transposed", "GPT2LMHeadModel"),
    LiveCase("MLA", "DeepSeek-V2, dense layers", overrides=_MLA),
    LiveCase("MLA, experts, fp32 router bias; messages of 4 KiB", "DeepseekV3ForCausalLM",
             overrides=_MLA, bucket_bytes=4096, in_suite=True),
    LiveCase("experts", "Qwen3MoeForCausalLM", 2),
    LiveCase("transposed interleaved experts with biases", "GptOssForCausalLM", 2),
    LiveCase("state-space, computed A", "Mamba2ForCausalLM", in_suite=True),
    LiveCase("hybrid", "FalconH1ForCausalLM"),
    LiveCase("vision-language", "Qwen2_5_VLForConditionalGeneration", in_suite=True),
    LiveCase("tied", "Gemma3ForCausalLM", 2),
    LiveCase("Transformers backend", "Olmo2ForCausalLM"),
    LiveCase("fewer KV heads than ranks", "Llama, 1 KV head", 2),
    LiveCase("padded vocabulary", "Llama, vocabulary 101", 2),
)  # fmt: skip
