"""Live memory that is shared where the loader's is not, and the other way round."""

import torch

from reshard_vllm.install.aliases import find_aliases
from reshard_vllm.recording.slots import slots_of


def _loaded(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def test_separate_memory_is_no_alias() -> None:
    slots = {slot.key: slot for slot in slots_of(_loaded(a=(4,), b=(4,)).items())}
    found = find_aliases(slots, {"a": torch.zeros(4), "b": torch.zeros(4)})
    assert not found.tied
    assert not found.apart
    assert not found.faults


def test_tied_after_loading() -> None:
    slots = {slot.key: slot for slot in slots_of(_loaded(embedding=(4, 2), head=(4, 2)).items())}
    live = torch.zeros(4, 2)
    assert find_aliases(slots, {"embedding": live, "head": live}).tied == {"head": "embedding"}


def test_overlapping_memory_is_refused() -> None:
    slots = {slot.key: slot for slot in slots_of(_loaded(a=(4,), b=(3,)).items())}
    live = torch.zeros(4)
    found = find_aliases(slots, {"a": live, "b": live[1:]})
    assert found.faults == {"b": "its live memory overlaps that of a, the loader's does not"}


def test_views_of_one_storage_stay_together_or_are_apart() -> None:
    weight = torch.empty(4, 1, 2, device="meta")
    loaded = {"weight": weight, "unpacked": weight.view(4, 2)}
    slots = {slot.key: slot for slot in slots_of(loaded.items())}
    live = torch.zeros(4, 1, 2)
    assert not find_aliases(slots, {"weight": live, "unpacked": live.view(4, 2)}).apart
    apart = find_aliases(slots, {"weight": live, "unpacked": torch.zeros(4, 2)}).apart
    assert apart == {"weight": ("unpacked",)}
