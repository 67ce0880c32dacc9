"""How to sample, and one request to one engine.

Log-probabilities are vLLM's own: by default those of the raw logits. Where `temperature` is not 1
or `top_p`, `top_k` cut the distribution, the engine must be started with
`--logprobs-mode processed_logprobs`, else they are not the behaviour policy's.
"""

import hashlib
from typing import Literal

import msgspec

from reshard_trainer.rollouts.errors import RolloutError
from reshard_trainer.rollouts.rollout import SampleId, VersionSpan

Setting = str | int | float | bool | list[str] | list[int] | dict[str, float] | None


class Sampling(msgspec.Struct, frozen=True):
    """Sampling settings of a run.

    Attributes:
        max_tokens: most output tokens of one sample.
        temperature: 0 is greedy.
        top_p: probability mass that is kept.
        top_k: tokens that are kept; 0: all.
        stop_token_ids: tokens that end a sample, beside the model's own.
        ignore_eos: whether the model's end token is sampled past.
        seed: of the run. Every sample has a seed of its own that follows from this and its
            identity, so that equal weights give equal samples wherever they are generated.
        more: further fields of vLLM's `SamplingParams`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    more: dict[str, Setting] = {}

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RolloutError(f"max_tokens {self.max_tokens}: at least one token a sample")

    def seed_of(self, sample: SampleId, start: int) -> int:
        """The seed with which a sample goes on from output token `start`.

        >>> Sampling(max_tokens=4).seed_of(SampleId(7, 0), 0)
        1153965048
        """
        text = f"{self.seed}/{sample.serial}/{sample.sample}/{start}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1


class Request(msgspec.Struct, frozen=True):
    """One request for one sample, or for the rest of one.

    Attributes:
        sample: which.
        tokens: [prompt_length + tokens so far] what to continue.
        max_tokens: most tokens to add.
        seed: of this request.
        sampling: the run's settings.
        name: of this request, for the engine's log; differs for each attempt.
    """

    sample: SampleId
    tokens: tuple[int, ...]
    max_tokens: int
    seed: int
    sampling: Sampling
    name: str

    def parameters(self) -> dict[str, Setting]:
        """As keywords of vLLM's `SamplingParams`; the log-probability of each sampled token too."""
        sampling = self.sampling
        parameters: dict[str, Setting] = {
            "max_tokens": self.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "ignore_eos": sampling.ignore_eos,
            "seed": self.seed,
            "logprobs": 0,
            "detokenize": "stop" in sampling.more,
        }
        if sampling.stop_token_ids:
            parameters["stop_token_ids"] = list(sampling.stop_token_ids)
        return parameters | sampling.more


class Generation(msgspec.Struct, frozen=True):
    """What one engine answered to one request.

    Attributes:
        tokens: [new_tokens]
        log_probs: [new_tokens]
        spans: in tokens of this answer.
        finish: `abort`: the engine was told to stop; the tokens so far are good.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: Literal["stop", "length", "abort"]
