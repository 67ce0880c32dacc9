"""Where a trainer's tensors differ from the engine's checkpoint in a way that is no mistake.

Two differences are between any two frameworks: how many rows of padding follow the vocabulary, and
under which name a tied embedding is kept. The loader is given what it knows; the regions are the
trainer's own, since padding comes last.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from reshard.ids import FQN
from reshard.session import TensorSpec
from reshard_vllm.recording.landing import slot_of
from reshard_vllm.recording.loader_map import LoaderMap

_PADS_TO: Final = 8
_MOST: Final = 8192
"""Rows: padding for 64 ranks, each to a multiple of 128."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary's tensors in the engine's checkpoint.

    Attributes:
        shapes: by name.
        outputs: names of those that the engine ties to an embedding, with the embedding's.
        tied: whether the configuration ties output and embedding.
    """

    shapes: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, str]
    tied: bool


def vocabulary_of(
    model: torch.nn.Module,
    config: VllmConfig,
    recorded: LoaderMap,
    specs: Sequence[TensorSpec],
    tied: Mapping[str, str],
) -> Vocabulary:
    """The vocabulary's tensors, by where the engine's checkpoint lands.

    Args:
        model: the live model.
        config: of its worker.
        recorded: the map of the engine's checkpoint.
        specs: of that checkpoint.
        tied: slot key -> key of the slot that it shares live memory with.
    """
    slots: dict[str, str] = {}
    for landing in recorded.landings.landings:
        key = slot_of(landing.piece.storage)
        module = model.get_submodule(key.rpartition(".")[0])
        if isinstance(module, VocabParallelEmbedding):
            slots[landing.name] = key
    names = {key: name for name, key in slots.items()}
    return Vocabulary(
        shapes={spec.name: spec.shape for spec in specs if spec.name in slots},
        outputs={
            names[key]: names[first]
            for key, first in tied.items()
            if key in names and first in names
        },
        tied=bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False)),
    )


@dataclass(frozen=True, slots=True)
class Fitted:
    """The trainer's tensors as the engine's loader knows them.

    Attributes:
        specs: to be given to the loader.
        names: from a name that the loader knows to the trainer's, where they differ.
        notes: one line for each difference.
    """

    specs: tuple[TensorSpec, ...]
    names: Mapping[FQN, FQN]
    notes: tuple[str, ...]


def fit(given: Sequence[TensorSpec], known: Set[str], vocabulary: Vocabulary) -> Fitted:
    """Find the differences that are no mistakes.

    Args:
        given: the trainer's tensors.
        known: all names of the engine's checkpoint.
        vocabulary: its tensors with a row a token.
    """
    names: dict[FQN, FQN] = {}
    notes: list[str] = []
    specs = [_without_padding(spec, vocabulary, notes) for spec in given]
    sent = {spec.name for spec in specs}
    for name, shape in vocabulary.shapes.items():
        stand_in = _stand_in(name, shape, specs, known, vocabulary) if name not in sent else None
        if stand_in is not None:
            if stand_in.name not in known:
                specs.remove(stand_in)
            specs.append(msgspec.structs.replace(stand_in, name=name))
            names[FQN(name)] = FQN(stand_in.name)
            notes.append(f"{name}: tied, and published as {stand_in.name}")
    return Fitted(tuple(specs), names, tuple(notes))


def _without_padding(spec: TensorSpec, vocabulary: Vocabulary, notes: list[str]) -> TensorSpec:
    wanted = vocabulary.shapes.get(spec.name)
    if wanted is None and vocabulary.tied and spec.shape:
        # A tied output under a name of its own: padded as the embedding.
        wanted = next((s for s in vocabulary.shapes.values() if s[1:] == spec.shape[1:]), None)
        if wanted is not None and not _is_output(spec.name):
            wanted = None
    if not wanted or wanted == spec.shape or wanted[1:] != spec.shape[1:]:
        return spec
    more = spec.shape[0] - wanted[0]
    if not 0 < more < _MOST or spec.shape[0] % _PADS_TO:
        return spec
    notes.append(
        f"{spec.name}: rows {wanted[0]} to {spec.shape[0] - 1} are taken for padding of the "
        "vocabulary and stay at the trainer"
    )
    return msgspec.structs.replace(spec, shape=wanted)


def _stand_in(
    name: str,
    shape: tuple[int, ...],
    specs: Sequence[TensorSpec],
    known: Set[str],
    vocabulary: Vocabulary,
) -> TensorSpec | None:
    """The tensor that is tied to a missing one; None where that is not certain."""
    found = [
        spec
        for spec in specs
        if spec.shape == shape
        and (
            vocabulary.outputs.get(spec.name) == name
            or (vocabulary.tied and spec.name not in known and _is_output(spec.name))
        )
    ]
    return found[0] if len(found) == 1 else None


def _is_output(name: str) -> bool:
    module = name.removesuffix(".weight").rpartition(".")[2]
    return module in ("lm_head", "output", "output_layer", "embed_out", "head")


def renamed(recorded: LoaderMap, fitted: Fitted) -> LoaderMap:
    """The loader's map under the trainer's names."""
    if not fitted.names:
        return recorded
    found = recorded.landings
    found.landings = [
        replace(landing, name=fitted.names.get(landing.name, landing.name))
        for landing in found.landings
    ]
    landed = {landing.name for landing in found.landings}
    ignored = {fitted.names.get(name, name) for name in recorded.unused} - landed
    return replace(recorded, unused=tuple(sorted(ignored)))
