"""What was proven of one rank's live parameters: the result of `proof.py`, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from reshard.session import TensorSpec
from reshard_vllm.install.fitting import Vocabulary
from reshard_vllm.install.postload import Layer

Class = Literal["direct", "repacked", "refused"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proven of one rank's live parameters.

    Attributes:
        basis: `checkpoint` (the round trip) or `rehearsal` (no checkpoint to compare with).
        classes: by slot key.
        reasons: why a slot is refused.
        layers: the layers with a post-load step, in vLLM's order, by name.
        owners: names of the layers that have a slot's storage among their parameters.
        covered: by slot key, how many elements the engine's own checkpoint fills; None if unknown.
        constants: by slot key, how many of these the loader makes of constants alone.
        order: names of the engine's own checkpoint, in its order; empty if there is none.
        vocabulary: its tensors with a row a token.
        kept: load-layout values of parameters that no checkpoint tensor fills, by slot key.
        copies: by slot key, names that keep a copy of its elements in load layout, beside it.
        tied: by slot key, the slot that vLLM tied it to after loading: one live storage for both.
    """

    basis: Literal["checkpoint", "rehearsal"]
    classes: Mapping[str, Class]
    reasons: Mapping[str, str]
    layers: Mapping[str, Layer]
    owners: Mapping[str, tuple[str, ...]]
    covered: Mapping[str, int] | None
    constants: Mapping[str, int]
    kept: Mapping[str, torch.Tensor]
    copies: Mapping[str, tuple[str, ...]]
    tied: Mapping[str, str]
    order: tuple[str, ...]
    vocabulary: Vocabulary

    def in_order(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The trainer's tensors as the engine's checkpoint would give them: loaders may group."""
        places = {name: at for at, name in enumerate(self.order)}
        return tuple(sorted(specs, key=lambda spec: places.get(spec.name, len(places))))
