"""Shapes of published models: canonical tensors, and which kind of engine module takes each.

Sizes are those of the models' public configurations. No weights, no multi-token-prediction layers,
no quantization scales. Not here: who holds what (`parallelism`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Final

from reshard.errors import LayoutError
from reshard.ids import FQN


class Role(Enum):
    """What an engine does with a tensor: how tensor parallelism cuts it, and what it is fused with.

    Named after vLLM's module that takes it.
    """

    EMBEDDING = "vocabulary, cut by rows"
    COLUMN = "column-parallel linear of its own"
    ROW = "row-parallel linear"
    QKV = "part of a fused qkv_proj"
    GATE_UP = "part of a fused gate_up_proj"
    FUSED_REPLICATED = "part of a fused linear that every rank holds (fused_qkv_a_proj)"
    REPLICATED = "linear that every rank holds (a router)"
    PLAIN = "norm or bias that every rank holds"
    EXPERT_GATE_UP = "part of one expert's w13"
    EXPERT_DOWN = "one expert's w2"

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to a routed expert."""
        return self in (Role.EXPERT_GATE_UP, Role.EXPERT_DOWN)


@dataclass(frozen=True, slots=True)
class Family:
    """The same tensor of several layers, and of all experts of these.

    Attributes:
        template: canonical name, with `{layer}` and `{expert}`.
        shape: of each tensor, in elements.
        role: what an engine does with it.
        layers: which layers have it; empty: it stands outside the layers.
        experts: routed experts of a layer, or 0.
        heads: of a tensor that is cut by whole heads: how many; else 0. More tensor-parallel
            ranks than heads hold replicas.
        last: outside the layers: whether it stands after them.
    """

    template: str
    shape: tuple[int, ...]
    role: Role
    layers: tuple[int, ...] = ()
    experts: int = 0
    heads: int = 0
    last: bool = False

    def names(self, layers: Sequence[int], experts: Sequence[int]) -> Iterator[FQN]:
        """Names of the tensors of some layers and experts."""
        for layer in layers or (0,):
            for expert in experts if self.experts else (0,):
                yield FQN(self.template.format(layer=layer, expert=expert))

    @property
    def count(self) -> int:
        """Number of tensors."""
        return max(len(self.layers), 1) * max(self.experts, 1)

    @property
    def elements(self) -> int:
        """Elements of all its tensors."""
        return prod(self.shape) * self.count


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model.

    Attributes:
        name: what `--model` takes.
        layers: number of decoder layers.
        experts: routed experts of a layer, or 0.
        families: all of its tensors.
    """

    name: str
    layers: int
    experts: int
    families: tuple[Family, ...]

    @property
    def tensors(self) -> int:
        """Number of canonical tensors."""
        return sum(family.count for family in self.families)

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return sum(family.elements for family in self.families)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Grouped-query attention.

    Attributes:
        heads, kv_heads: numbers of heads.
        head_dim: elements of one.
        norms: whether queries and keys are normalised.
        biases: whether q, k and v have biases.
    """

    heads: int
    kv_heads: int
    head_dim: int
    norms: bool = False
    biases: bool = False

    def families(self, hidden: int, layers: tuple[int, ...]) -> Iterator[Family]:
        """The tensors of an attention block."""
        prefix = "model.layers.{layer}.self_attn."
        for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            rows = heads * self.head_dim
            name = f"{prefix}{part}_proj."
            yield Family(f"{name}weight", (rows, hidden), Role.QKV, layers, heads=heads)
            if self.biases:
                yield Family(f"{name}bias", (rows,), Role.QKV, layers, heads=heads)
        width = self.heads * self.head_dim
        yield Family(f"{prefix}o_proj.weight", (hidden, width), Role.ROW, layers)
        if self.norms:
            for part in "qk":
                yield Family(f"{prefix}{part}_norm.weight", (self.head_dim,), Role.PLAIN, layers)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA).

    Attributes:
        heads: number of heads.
        q_rank, kv_rank: sizes of the latents.
        nope, rope, value: elements of a head, by part.
    """

    heads: int
    q_rank: int = 1536
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128

    def families(self, hidden: int, layers: tuple[int, ...]) -> Iterator[Family]:
        """The tensors of an attention block; vLLM fuses q_a and kv_a into fused_qkv_a_proj."""
        prefix = "model.layers.{layer}.self_attn."
        heads = self.heads
        for name, shape, role in (
            ("q_a_proj", (self.q_rank, hidden), Role.FUSED_REPLICATED),
            ("q_a_layernorm", (self.q_rank,), Role.PLAIN),
            ("q_b_proj", (heads * (self.nope + self.rope), self.q_rank), Role.COLUMN),
            ("kv_a_proj_with_mqa", (self.kv_rank + self.rope, hidden), Role.FUSED_REPLICATED),
            ("kv_a_layernorm", (self.kv_rank,), Role.PLAIN),
            ("kv_b_proj", (heads * (self.nope + self.value), self.kv_rank), Role.COLUMN),
            ("o_proj", (hidden, heads * self.value), Role.ROW),
        ):
            yield Family(f"{prefix}{name}.weight", shape, role, layers)


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture-of-experts feed-forward blocks.

    Attributes:
        count: routed experts.
        width: intermediate size of one.
        dense_layers: how many layers, from the first, are dense instead.
        shared: shared experts.
        corrected: whether the router has a bias for load balancing.
    """

    count: int
    width: int
    dense_layers: int = 0
    shared: int = 0
    corrected: bool = False

    def families(self, hidden: int, layers: tuple[int, ...]) -> Iterator[Family]:
        """The tensors of a block."""
        prefix = "model.layers.{layer}.mlp."
        yield Family(f"{prefix}gate.weight", (self.count, hidden), Role.REPLICATED, layers)
        if self.corrected:
            bias = f"{prefix}gate.e_score_correction_bias"
            yield Family(bias, (self.count,), Role.PLAIN, layers)
        for part, shape, role in (
            ("gate", (self.width, hidden), Role.EXPERT_GATE_UP),
            ("up", (self.width, hidden), Role.EXPERT_GATE_UP),
            ("down", (hidden, self.width), Role.EXPERT_DOWN),
        ):
            name = f"{prefix}experts.{{expert}}.{part}_proj.weight"
            yield Family(name, shape, role, layers, self.count)
        if self.shared:
            yield from _feed_forward(
                f"{prefix}shared_experts.", hidden, self.shared * self.width, layers
            )


def _feed_forward(
    prefix: str, hidden: int, width: int, layers: tuple[int, ...]
) -> Iterator[Family]:
    for part in ("gate", "up"):
        yield Family(f"{prefix}{part}_proj.weight", (width, hidden), Role.GATE_UP, layers)
    yield Family(f"{prefix}down_proj.weight", (hidden, width), Role.ROW, layers)


def decoder(
    name: str,
    *,
    vocabulary: int,
    hidden: int,
    layers: int,
    attention: Grouped | Latent,
    width: int = 0,
    experts: Experts | None = None,
) -> ModelShape:
    """A decoder of the usual build.

    Args:
        name: of the model.
        vocabulary: rows of the embedding and of the output layer, which is not tied to it.
        hidden: size of a token's vector.
        layers: number of layers.
        attention: of every layer.
        width: intermediate size of dense layers.
        experts: of the other layers; None: all are dense.
    """
    every = tuple(range(layers))
    dense = every if experts is None else every[: experts.dense_layers]
    families = [
        Family("model.embed_tokens.weight", (vocabulary, hidden), Role.EMBEDDING),
        *attention.families(hidden, every),
        *(
            Family(f"model.layers.{{layer}}.{part}_layernorm.weight", (hidden,), Role.PLAIN, every)
            for part in ("input", "post_attention")
        ),
        Family("model.norm.weight", (hidden,), Role.PLAIN, last=True),
        Family("lm_head.weight", (vocabulary, hidden), Role.EMBEDDING, last=True),
    ]
    if dense:
        families += _feed_forward("model.layers.{layer}.mlp.", hidden, width, dense)
    if experts is not None:
        families += experts.families(hidden, every[experts.dense_layers :])
    return ModelShape(name, layers, experts.count if experts else 0, tuple(families))


def _deepseek_v3() -> ModelShape:
    return decoder(
        "deepseek-v3",
        vocabulary=129280,
        hidden=7168,
        layers=61,
        attention=Latent(128),
        width=18432,
        experts=Experts(256, 2048, dense_layers=3, shared=1, corrected=True),
    )


def _kimi_k2() -> ModelShape:
    return decoder(
        "kimi-k2",
        vocabulary=163840,
        hidden=7168,
        layers=61,
        attention=Latent(64),
        width=18432,
        experts=Experts(384, 2048, dense_layers=1, shared=1, corrected=True),
    )


def _glm_air() -> ModelShape:
    return decoder(
        "glm-4.5-air",
        vocabulary=151552,
        hidden=4096,
        layers=46,
        attention=Grouped(96, 8, 128, biases=True),
        width=10944,
        experts=Experts(128, 1408, dense_layers=1, shared=1, corrected=True),
    )


def _qwen3_8b() -> ModelShape:
    return decoder(
        "qwen3-8b",
        vocabulary=151936,
        hidden=4096,
        layers=36,
        attention=Grouped(32, 8, 128, norms=True),
        width=12288,
    )


def _qwen3_moe(name: str, hidden: int, layers: int, heads: int, width: int) -> ModelShape:
    return decoder(
        name,
        vocabulary=151936,
        hidden=hidden,
        layers=layers,
        attention=Grouped(heads, 4, 128, norms=True),
        experts=Experts(128, width),
    )


def _llama_70b() -> ModelShape:
    return decoder(
        "llama-70b",
        vocabulary=128256,
        hidden=8192,
        layers=80,
        attention=Grouped(64, 8, 128),
        width=28672,
    )


MODELS: Final[Mapping[str, Callable[[], ModelShape]]] = {
    "deepseek-v3": _deepseek_v3,
    "glm-4.5-air": _glm_air,
    "kimi-k2": _kimi_k2,
    "llama-70b": _llama_70b,
    "qwen3-8b": _qwen3_8b,
    "qwen3-30b-a3b": lambda: _qwen3_moe("qwen3-30b-a3b", 2048, 48, 32, 768),
    "qwen3-235b-a22b": lambda: _qwen3_moe("qwen3-235b-a22b", 4096, 94, 64, 1536),
}
"""What `--model` takes."""


def model(name: str) -> ModelShape:
    """A model by its name.

    Raises:
        LayoutError: no such model.
    """
    if name not in MODELS:
        raise LayoutError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    return MODELS[name]()
