"""Live tensors that share memory where the loader's do not, and the other way round.

vLLM may tie word embeddings after loading, because the checkpoint happened to hold them equal
(`maybe_retie_word_embeddings`): two storages of the loader are then one in the live model. Another
checkpoint may differ in them, and writing both would leave the one that is written last.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from reshard_vllm.recording.slots import Slot


@dataclass(frozen=True, slots=True)
class Aliases:
    """How live memory is shared.

    Attributes:
        tied: slot key -> key of the slot whose live storage it shares whole: both must receive
            equal elements.
        apart: by slot key, names that the loader fills with it and that have memory of their own.
        faults: reason by slot key, where memory is shared in a way that no refit keeps.
    """

    tied: Mapping[str, str]
    apart: Mapping[str, tuple[str, ...]]
    faults: Mapping[str, str]


def find_aliases(slots: Mapping[str, Slot], live: Mapping[str, torch.Tensor]) -> Aliases:
    """Compare the storages of the loader with those of the live model."""
    tied, faults = dict[str, str](), dict[str, str]()
    for first, second in _overlapping(slots, live):
        if _same_place(live[first], live[second]):
            tied[second] = tied.get(first, first)
        else:
            faults[second] = f"its live memory overlaps that of {first}, the loader's does not"
    apart = {slot.key: names for slot in slots.values() if (names := _apart(slot, live))}
    return Aliases(tied, apart, faults)


def _apart(slot: Slot, live: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    first = live.get(slot.key)
    if first is None:
        return ()
    apart = []
    for name, view in zip(slot.names[1:], slot.views[1:], strict=True):
        tensor = live.get(name)
        start = first.data_ptr() + (view.offset - slot.offset) * slot.dtype.itemsize
        if tensor is not None and tensor.numel() and tensor.data_ptr() != start:
            apart.append(name)
    return tuple(apart)


def _overlapping(
    slots: Mapping[str, Slot], live: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str]]:
    """Pairs of slots whose live bytes overlap; the one that comes first in the model is first."""
    order = {key: at for at, key in enumerate(slots)}
    spans = sorted(
        (*_span(live[key]), order[key], key)
        for key in slots
        if key in live and live[key].numel() and not live[key].is_meta
    )
    open_until, opened = 0, ""
    for start, end, _, key in spans:
        if start < open_until:
            yield (opened, key) if order[opened] < order[key] else (key, opened)
        if end > open_until:
            open_until, opened = end, key


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the one after the last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _same_place(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.data_ptr() == second.data_ptr()
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.dtype == second.dtype
    )
