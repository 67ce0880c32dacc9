"""Slots: the storages that a loader fills, and the names under which a model holds them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from reshard.layout.view import StridedView
from reshard_vllm.recording.tape import storage_of


@dataclass(frozen=True, slots=True)
class Slot:
    """A storage that the loader fills.

    Attributes:
        key: the first name of the parameter or buffer that has it.
        names: all names, where several share the storage (tied weights).
        views: of each name, in elements of the storage.
        shape: of the parameter, as the loader sees it, in elements.
        stride: likewise.
        dtype: likewise.
        offset: of the parameter in its storage, in elements.
    """

    key: str
    names: tuple[str, ...]
    views: tuple[StridedView, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int


def slots_of(owned: Iterable[tuple[str, torch.Tensor]]) -> list[Slot]:
    """One slot a storage; the first name is its key."""
    held: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in owned:
        held.setdefault(storage_of(tensor), {}).setdefault(name, tensor)
    return [_slot(named) for named in held.values()]


def _slot(named: Mapping[str, torch.Tensor]) -> Slot:
    key, first = next(iter(named.items()))
    views = tuple(
        StridedView(int(t.storage_offset()), tuple(t.shape), tuple(t.stride()))
        for t in named.values()
    )
    return Slot(
        key,
        tuple(named),
        views,
        tuple(first.shape),
        tuple(first.stride()),
        first.dtype,
        int(first.storage_offset()),
    )
