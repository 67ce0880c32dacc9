"""The loader's map of one rank: each checkpoint tensor's places, by recording.

Everything here is about the *load layout*: the storages as the loader fills them, before vLLM's
post-load steps. Which live storage still has that layout is for `install` to prove.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from reshard.errors import RecordingError
from reshard.ids import FQN
from reshard.layout.view import StridedView
from reshard.session import TensorSpec
from reshard_vllm.recording.landings import Landings, resolve
from reshard_vllm.recording.skeleton import build_skeleton
from reshard_vllm.recording.tape import Tape, storage_of


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


@dataclass(frozen=True, slots=True)
class LoaderMap:
    """Where every checkpoint element lands on this rank.

    Attributes:
        slots: every parameter's and buffer's storage, by key.
        landings: movement, constants and programs.
        unused: canonical names of which no element lands here.
    """

    slots: Mapping[str, Slot]
    landings: Landings
    unused: tuple[FQN, ...]


def layout_of(vllm_config: VllmConfig, specs: Sequence[TensorSpec]) -> LoaderMap:
    """Record the loader on a skeleton, fed with `specs`.

    Args:
        vllm_config: of this rank's worker.
        specs: the checkpoint tensors, in the order in which a checkpoint would give them.

    Raises:
        RecordingError: the loader rejects a tensor, or does what cannot be followed.
    """
    skeleton = build_skeleton(vllm_config)
    sources = [
        torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
    ]
    before = _owned(skeleton)
    tape = Tape(sources, [tensor for _, tensor in before])
    try:
        with set_current_vllm_config(vllm_config), torch.no_grad(), tape:
            named = zip((spec.name for spec in specs), sources, strict=True)
            skeleton.load_weights(named)  # type: ignore[operator]
    except RecordingError:
        raise
    except Exception as error:
        raise RecordingError(
            f"{type(skeleton).__name__}'s loader rejects the trainer's tensors: "
            f"{type(error).__name__}: {error}"
        ) from error
    owned = [*_owned(skeleton), *before]
    slots = _slots(owned)
    by_storage = {storage_of(t): (_key_of(slots, name), t) for name, t in reversed(owned)}
    by_source = {storage_of(t): (FQN(spec.name), t) for spec, t in zip(specs, sources, strict=True)}
    landings = resolve(tape, by_source, by_storage)
    landed = {landing.name for landing in landings.landings}
    unused = tuple(sorted(FQN(spec.name) for spec in specs if FQN(spec.name) not in landed))
    return LoaderMap({slot.key: slot for slot in slots}, landings, unused)


def _owned(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers under every name."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _slots(owned: Iterable[tuple[str, torch.Tensor]]) -> list[Slot]:
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


def _key_of(slots: Sequence[Slot], name: str) -> str:
    return next(slot.key for slot in slots if name in slot.names)
