"""The configurations: one a line, with what a shrunk default configuration does not say.

`overrides` go to the configuration class; `edits` into the written config.json, for attributes that
vLLM reads and transformers no longer writes; `renames` give tensors the names that published
checkpoints have, where transformers saves others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

FOLDER: Final = Path(__file__).parents[4] / "build" / "breadth"

Kind = Literal["dense", "MoE", "MLA", "state-space", "hybrid", "encoder", "multimodal", "backend"]


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration.

    Attributes:
        name: of the case; the architecture's, where there is one case of it.
        kind: of the model.
        of: the class of transformers; empty: `name`.
        overrides: of the shrunk configuration.
        edits: of config.json.
        renames: of tensors in the checkpoint, prefix by prefix.
        transposed: ends of names whose last two dims published checkpoints have the other way.
        options: further engine arguments.
        stages: whether to try pipeline parallel too.
    """

    name: str
    kind: Kind
    of: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    edits: Mapping[str, Any] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    stages: bool = False

    @property
    def model_class(self) -> str:
        """The class of transformers."""
        return self.of or self.name

    @property
    def experts(self) -> bool:
        """Whether to try expert parallel too."""
        return self.kind == "MoE"


_TOWER: Final = {"model.vision_tower.": "vision_tower.vision_model.",
                 "vision_tower.embeddings": "vision_tower.vision_model.embeddings",
                 "vision_tower.encoder": "vision_tower.vision_model.encoder",
                 "vision_tower.post_layernorm": "vision_tower.vision_model.post_layernorm",
                 "vision_tower.pre_layrnorm": "vision_tower.vision_model.pre_layrnorm",
                 "vision_tower.head": "vision_tower.vision_model.head"}  # fmt: skip

_LFM2: Final = {"block_dim": 128, "conv_dim": 128, "block_multiple_of": 256,
                "block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0}  # fmt: skip

_DENSE: Final = [
    Case("LlamaForCausalLM", "dense", stages=True),
    Case("Llama, vocabulary 101", "dense", "LlamaForCausalLM", {"vocab_size": 101}),
    Case("Llama, vocabulary 250, tied", "dense", "LlamaForCausalLM",
         {"vocab_size": 250, "tie_word_embeddings": True}),
    Case("Llama, 1 KV head", "dense", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    Case("Llama, biases", "dense", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    Case("Qwen2ForCausalLM", "dense", stages=True),
    Case("Qwen3ForCausalLM", "dense", stages=True),
    Case("MistralForCausalLM", "dense", stages=True),
    Case("Ministral3ForCausalLM", "dense"),
    Case("GemmaForCausalLM", "dense"),
    Case("Gemma2ForCausalLM", "dense", stages=True),
    Case("Gemma3ForCausalLM", "dense", stages=True),
    Case("Gemma3TextModel", "encoder"),
    Case("Gemma4ForCausalLM", "dense", overrides={"per_layer_config": None},
         edits={"global_head_dim": 32}),
    Case("GraniteForCausalLM", "dense"),
    Case("GraniteSWAForCausalLM", "dense"),
    Case("CohereForCausalLM", "dense"),
    Case("Cohere2ForCausalLM", "dense", stages=True),
    Case("Ernie4_5ForCausalLM", "dense"),
    Case("Exaone4ForCausalLM", "dense"),
    Case("Glm4ForCausalLM", "dense"),
    Case("HyperCLOVAXForCausalLM", "dense"),
    Case("ApertusForCausalLM", "dense"),
    Case("HrmTextForCausalLM", "dense"),
    Case("NemotronForCausalLM", "dense", overrides={"num_key_value_heads": 2},
         edits={"head_dim": 32, "partial_rotary_factor": 0.5}),
    Case("StableLmForCausalLM", "dense"),
    Case("Phi3ForCausalLM", "dense", stages=True),
    Case("OPTForCausalLM", "dense"),
    Case("GPT2LMHeadModel", "dense", stages=True),
    Case("GPTJForCausalLM", "dense", overrides={"rotary_dim": 16}),
    Case("BloomForCausalLM", "dense"),
    Case("FalconForCausalLM", "dense", overrides={"ffn_hidden_size": 512}),
    Case("Falcon, new decoder", "dense", "FalconForCausalLM",
         {"ffn_hidden_size": 512, "new_decoder_architecture": True}),
    Case("Falcon, multi-head, ALiBi", "dense", "FalconForCausalLM",
         {"ffn_hidden_size": 512, "multi_query": False, "alibi": True}),
    Case("MiniCPM3ForCausalLM", "MLA"),
]  # fmt: skip

_MOE: Final = [
    Case("MixtralForCausalLM", "MoE", stages=True),
    Case("Qwen2MoeForCausalLM", "MoE"),
    Case("Qwen3MoeForCausalLM", "MoE", stages=True),
    Case("OlmoeForCausalLM", "MoE"),
    Case("GraniteMoeForCausalLM", "MoE"),
    Case("GraniteMoeSharedForCausalLM", "MoE"),
    Case("GraniteMoeSWAForCausalLM", "MoE"),
    Case("Ernie4_5_MoeForCausalLM", "MoE"),
    Case("ExaoneMoeForCausalLM", "MoE"),
    Case("Cohere2MoeForCausalLM", "MoE"),
    Case("GptOssForCausalLM", "MoE"),
    Case("Llama4ForCausalLM", "MoE"),
    Case("Glm4MoeForCausalLM", "MoE", edits={"head_dim": 32, "first_k_dense_replace": 1}),
    Case("Glm4MoeLiteForCausalLM", "MoE", edits={"first_k_dense_replace": 1}),
    Case("DeepseekV2ForCausalLM", "MoE", stages=True),
    Case("DeepSeek-V2, dense layers", "MLA", "DeepseekV2ForCausalLM", {"first_k_dense_replace": 2}),
    Case("DeepseekV3ForCausalLM", "MoE", edits={"topk_method": "noaux_tc"}),
    Case("AXK1ForCausalLM", "MoE", overrides={"first_k_dense_replace": 0}),
    Case("AfmoeForCausalLM", "MoE",
         edits={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}),
    Case("MiniMaxM2ForCausalLM", "MoE",
         edits={"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True}),
    Case("MiMoV2FlashForCausalLM", "MoE",
         edits={"layernorm_epsilon": 1e-6, "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1],
                "swa_head_dim": 32, "swa_v_head_dim": 32, "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 2, "sliding_window_size": 64,
                "scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
    Case("HYV3ForCausalLM", "MoE",
         edits={"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True,
                "qk_norm": True}),
    Case("LagunaForCausalLM", "MoE", overrides={"num_attention_heads_per_layer": [4, 4]}),
    Case("LongcatFlashForCausalLM", "MoE",
         edits={"mla_scale_q_lora": True, "mla_scale_kv_lora": True,
                "zero_expert_type": "identity", "zero_expert_num": 2}),
    Case("OpenAIPrivacyFilterForTokenClassification", "MoE"),
]  # fmt: skip

_STATE_SPACE: Final = [
    Case("MambaForCausalLM", "state-space", stages=True),
    Case("FalconMambaForCausalLM", "state-space"),
    Case("Mamba2ForCausalLM", "state-space",
         overrides={"num_heads": 8, "head_dim": 32, "expand": 2, "n_groups": 2}),
    Case("JambaForCausalLM", "hybrid"),
    Case("JambaForSequenceClassification", "hybrid"),
    Case("FalconH1ForCausalLM", "hybrid",
         overrides={"mamba_d_ssm": 256, "mamba_expand": 2, "mamba_n_groups": 2}),
    Case("GraniteMoeHybridForCausalLM", "hybrid"),
    Case("Zamba2ForCausalLM", "hybrid",
         overrides={"num_hidden_layers": 4, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 2,
                    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
                    "attention_hidden_size": 256, "attention_head_dim": 64}),
    Case("NemotronHForCausalLM", "hybrid"),
    Case("Lfm2ForCausalLM", "hybrid", edits=_LFM2),
    Case("Lfm2MoeForCausalLM", "hybrid",
         overrides={"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    Case("Qwen3NextForCausalLM", "hybrid", overrides={"num_hidden_layers": 4}),
    Case("Qwen3_5ForCausalLM", "hybrid"),
    Case("Qwen3_5MoeForCausalLM", "hybrid"),
    Case("OlmoHybridForCausalLM", "hybrid"),
    Case("KimiLinearForCausalLM", "hybrid"),
]  # fmt: skip

_ENCODERS: Final = [
    Case("BertModel", "encoder"),
    Case("BertForMaskedLM", "encoder"),
    Case("BertForSequenceClassification", "encoder"),
    Case("BertForTokenClassification", "encoder"),
    Case("RobertaModel", "encoder"),
    Case("RobertaForMaskedLM", "encoder"),
    Case("RobertaForSequenceClassification", "encoder"),
    Case("RobertaForTokenClassification", "encoder"),
    Case("XLMRobertaModel", "encoder", edits={"position_embedding_type": "absolute"}),
    Case("XLMRobertaForSequenceClassification", "encoder"),
    Case("XLMRobertaForTokenClassification", "encoder"),
    Case("ModernBertModel", "encoder"),
    Case("ModernBertForSequenceClassification", "encoder"),
    Case("ModernBertForTokenClassification", "encoder"),
    Case("NomicBertModel", "encoder", edits={"activation_function": "swiglu"}),
    Case("Qwen2Model", "encoder", renames={"": "model."}),
    Case("GPT2ForSequenceClassification", "encoder"),
]

_MULTIMODAL: Final = [
    Case("CLIPModel", "multimodal"),
    Case("SiglipModel", "multimodal"),
    Case("WhisperForConditionalGeneration", "multimodal"),
    Case("AriaForConditionalGeneration", "multimodal"),
    Case("Blip2ForConditionalGeneration", "multimodal"),
    Case("Exaone4_5_ForConditionalGeneration", "multimodal"),
    Case("Gemma3ForConditionalGeneration", "multimodal", renames=_TOWER),
    Case("Gemma4ForConditionalGeneration", "multimodal",
         overrides={"text_config.per_layer_config": None}),
    Case("Glm4vForConditionalGeneration", "multimodal"),
    Case("Glm4vMoeForConditionalGeneration", "multimodal",
         edits={"text_config.head_dim": 32, "text_config.use_qk_norm": False}),
    Case("GlmOcrForConditionalGeneration", "multimodal"),
    Case("GlmAsrForConditionalGeneration", "multimodal",
         renames={"language_model.model.": "language_model."}),
    Case("Idefics3ForConditionalGeneration", "multimodal"),
    Case("SmolVLMForConditionalGeneration", "multimodal"),
    Case("InternVLForConditionalGeneration", "multimodal"),
    Case("LlavaForConditionalGeneration", "multimodal", renames=_TOWER),
    Case("LlavaNextForConditionalGeneration", "multimodal", renames=_TOWER),
    Case("LlavaOnevisionForConditionalGeneration", "multimodal", renames=_TOWER),
    Case("PaliGemmaForConditionalGeneration", "multimodal", renames=_TOWER),
    Case("Mistral3ForConditionalGeneration", "multimodal"),
    Case("Qwen2VLForConditionalGeneration", "multimodal"),
    Case("Qwen2_5_VLForConditionalGeneration", "multimodal"),
    Case("Qwen3VLForConditionalGeneration", "multimodal"),
    Case("Qwen3VLMoeForConditionalGeneration", "multimodal",
         edits={"text_config.norm_topk_prob": True},
         transposed=(".experts.gate_up_proj", ".experts.down_proj")),
    Case("Qwen3_5ForConditionalGeneration", "multimodal"),
    Case("Qwen3_5MoeForConditionalGeneration", "multimodal"),
    Case("Qwen2AudioForConditionalGeneration", "multimodal",
         renames={"language_model.model.": "language_model."}),
    Case("VoxtralForConditionalGeneration", "multimodal",
         edits={"audio_config.downsample_factor": 4}),
]  # fmt: skip

_BACKEND: Final = [
    Case("ArceeForCausalLM", "backend"),
    Case("CwmForCausalLM", "backend"),
    Case("GlmForCausalLM", "backend"),
    Case("GPTBigCodeForCausalLM", "backend"),
    Case("GPTNeoXForCausalLM", "backend"),
    Case("Jais2ForCausalLM", "backend"),
    Case("OlmoForCausalLM", "backend"),
    Case("Olmo2ForCausalLM", "backend", stages=True),
    Case("Olmo3ForCausalLM", "backend"),
    Case("PhiForCausalLM", "backend"),
    Case("SeedOssForCausalLM", "backend"),
    Case("SmolLM3ForCausalLM", "backend"),
    Case("Starcoder2ForCausalLM", "backend"),
    Case("VaultGemmaForCausalLM", "backend"),
    Case("FlexOlmoForCausalLM", "backend"),
    Case("MellumForCausalLM", "backend"),
]

CASES: Final = (*_DENSE, *_MOE, *_STATE_SPACE, *_ENCODERS, *_MULTIMODAL, *_BACKEND)
