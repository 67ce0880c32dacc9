"""What a proof means for the trainer's tensors: bytes by class, and what stands in the way."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

import torch

from reshard.dtypes import DType, itemsize, parse_dtype
from reshard.ids import FQN
from reshard.layout.boxes import union
from reshard.layout.region import Region
from reshard.session import TensorSpec
from reshard_vllm.install.evidence import Proof
from reshard_vllm.install.shadow import coverage
from reshard_vllm.recording.landing import Landing, slot_of
from reshard_vllm.recording.loader_map import LoaderMap

Kind = Literal["direct", "repacked", "computed", "refused"]

_ORDER: Final[tuple[Kind, ...]] = ("refused", "computed", "repacked", "direct")
"""An element with several places counts where it costs most."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Why a rank cannot be refitted.

    Attributes:
        refused: reason by slot key, of slots that the trainer's tensors reach.
        uncovered: by slot key, elements of it that no tensor of the trainer fills.
    """

    refused: Mapping[str, str]
    uncovered: Mapping[str, int]

    def lines(self) -> tuple[str, ...]:
        """One line each, for a report."""
        refused = [f"{key}: {reason}" for key, reason in self.refused.items()]
        uncovered = [
            f"{key}: {count} elements get no tensor of the trainer"
            for key, count in self.uncovered.items()
        ]
        return (*refused, *uncovered)


def written_slots(recorded: LoaderMap) -> list[str]:
    """The slots that the loader fills with anything, constants included, sorted."""
    found = recorded.landings
    landed = {slot_of(landing.piece.storage) for landing in found.landings}
    noted = {key for notes in (found.constants, found.programs) for key in notes if notes[key]}
    return sorted(landed | noted)


def kind_of(recorded: LoaderMap, proof: Proof, storage: str) -> Kind:
    """Class of what lands in a storage."""
    key = slot_of(storage)
    proven = proof.classes.get(key, "refused")
    if key in recorded.landings.refused:
        return "refused"
    if proven != "refused" and recorded.landings.programs.get(key):
        return "computed"
    return proven


def wire_dtype(landing: Landing, given: DType) -> DType:
    """The narrower of the trainer's dtype and the destination's."""
    wanted = parse_dtype(str(landing.dtype))
    return wanted if itemsize(wanted) <= itemsize(given) else given


def class_bytes(recorded: LoaderMap, proof: Proof, specs: Iterable[TensorSpec]) -> dict[Kind, int]:
    """Wire bytes that this rank receives, by class; each element once."""
    given = {FQN(spec.name): spec.dtype for spec in specs}
    boxes: dict[tuple[FQN, DType], dict[Kind, list[Region]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for landing in recorded.landings.landings:
        dtype = wire_dtype(landing, given[landing.name])
        kind = kind_of(recorded, proof, landing.piece.storage)
        boxes[landing.name, dtype][kind].append(landing.piece.region)
    counts: dict[Kind, int] = dict.fromkeys(_ORDER, 0)
    for (_, dtype), by_kind in boxes.items():
        seen, held = 0, list[Region]()
        for kind in _ORDER:
            held += by_kind.get(kind, ())
            total = sum(box.volume for box in union(held))
            counts[kind] += (total - seen) * itemsize(dtype)
            seen = total
    return counts


def find_faults(recorded: LoaderMap, proof: Proof, model: torch.nn.Module) -> Faults:
    """Everything that keeps the trainer's tensors from being installed."""
    refused = {
        key: recorded.landings.refused.get(key) or proof.reasons[key]
        for key in sorted({*written_slots(recorded), *recorded.landings.refused})
        if key in recorded.landings.refused or proof.classes.get(key, "refused") == "refused"
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    uncovered = {}
    for key, elements in coverage(recorded).items():
        if key in refused or (key in proof.tied and not elements):
            continue  # what is tied is filled with the slot that it is tied to
        wanted = _wanted(recorded, proof, key, is_parameter=key in parameters)
        if elements < wanted:
            uncovered[key] = wanted - elements
    return Faults(refused, uncovered)


def _wanted(recorded: LoaderMap, proof: Proof, key: str, *, is_parameter: bool) -> int:
    """Elements that a refit has to write: what the engine's own checkpoint fills."""
    if proof.covered is not None:
        return proof.covered.get(key, 0)
    # Without a checkpoint: all parameters; of buffers, those that the trainer sends.
    return prod(recorded.slots[key].shape) if is_parameter else 0
