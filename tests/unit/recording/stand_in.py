"""A small model that loads as vLLM's do: fused parameters, loaders as methods, one rank of several.

Stands in for vLLM's models where a single trick of a loader is the subject.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from reshard.ids import FQN
from reshard_vllm.recording.landings import Landings, resolve
from reshard_vllm.recording.replay import Environment
from reshard_vllm.recording.tape import Ref, Tape, storage_of

Loader = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]
"""Writes parameters (first) from checkpoint tensors (second)."""


def record(
    loader: Loader,
    parameters: Mapping[str, torch.Tensor],
    checkpoint: dict[str, torch.Tensor],
) -> Landings:
    """Record `loader` with meta tensors in place of the checkpoint's."""
    sources = {name: torch.empty_like(t, device="meta") for name, t in checkpoint.items()}
    tape = Tape(list(sources.values()), list(parameters.values()))
    with torch.no_grad(), tape:
        loader(dict(parameters), sources)
    owned: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in parameters.items():
        owned.setdefault(storage_of(tensor), (name, tensor))
    by_source = {storage_of(t): (FQN(name), t) for name, t in sources.items()}
    return resolve(tape, by_source, owned)


def replayed(
    found: Landings,
    parameters: Mapping[str, torch.Tensor],
    checkpoint: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """What the record makes of real data, on new parameters."""
    made = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in parameters.items()}
    stages = [torch.zeros(stage.shape, dtype=stage.dtype) for stage in found.stages]
    storages = {
        **{name: t.reshape(-1) for name, t in made.items()},
        **{stage.key: t.reshape(-1) for stage, t in zip(found.stages, stages, strict=True)},
    }
    for landing in found.landings:
        region, view = landing.piece.region, landing.piece.view
        target = storages[landing.piece.storage].as_strided(view.shape, view.stride, view.offset)
        target.copy_(checkpoint[landing.name][tuple(map(slice, region.offset, region.end))])
    for key in parameters:
        _run(key, found, storages[key], stages)
    return made


def _run(key: str, found: Landings, flat: torch.Tensor, stages: Sequence[torch.Tensor]) -> None:
    def load(ref: Ref) -> torch.Tensor:
        if ref.kind == "owned":
            return flat.as_strided(ref.view.shape, ref.view.stride, ref.view.offset)
        return ref.constant if ref.constant is not None else stages[ref.storage]

    environment = Environment(load)
    for note in (*found.constants.get(key, ()), *found.programs.get(key, ())):
        environment.step(note)


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Bit equality of all."""
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def loaded(
    loader: Loader, parameters: Mapping[str, torch.Tensor], checkpoint: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What the loader itself makes, on new parameters that start as zeros."""
    made: dict[str, torch.Tensor] = {}
    by_storage: dict[int, torch.Tensor] = {}
    for name, t in parameters.items():
        made[name] = by_storage.setdefault(storage_of(t), torch.zeros(t.shape, dtype=t.dtype))
    with torch.no_grad():
        loader(made, checkpoint)
    return made
