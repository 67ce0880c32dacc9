"""The loader's map of one rank: each checkpoint tensor's places, by recording.

Everything here is about the *load layout*: the storages as the loader fills them, before vLLM's
post-load steps. Which live storage still has that layout is for `install` to prove.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from reshard.errors import RecordingError
from reshard.ids import FQN
from reshard.session import TensorSpec
from reshard_vllm.recording.landings import Landings, resolve
from reshard_vllm.recording.skeleton import build_skeleton
from reshard_vllm.recording.slots import Slot, slots_of
from reshard_vllm.recording.tape import Tape, storage_of


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
    refuse_online_quantization(skeleton)
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
    slots = slots_of(owned)
    by_storage = {storage_of(t): (_key_of(slots, name), t) for name, t in reversed(owned)}
    by_source = {storage_of(t): (FQN(spec.name), t) for spec, t in zip(specs, sources, strict=True)}
    landings = resolve(tape, by_source, by_storage)
    landed = {landing.name for landing in landings.landings}
    unused = tuple(sorted(FQN(spec.name) for spec in specs if FQN(spec.name) not in landed))
    return LoaderMap({slot.key: slot for slot in slots}, landings, unused)


def refuse_online_quantization(model: torch.nn.Module) -> None:
    """Layers that quantise inside `load_weights` have nothing that movement could fill.

    Raises:
        RecordingError: names them.
    """
    faults = [
        f"{name}: {type(method).__name__} quantises while it loads"
        for name, module in model.named_modules()
        if getattr(method := getattr(module, "quant_method", None), "uses_meta_device", False)
    ]
    if faults:
        raise RecordingError(
            "the engine quantises an unquantised checkpoint; start it on a checkpoint that is "
            "quantised, or without quantisation",
            faults,
        )


def _owned(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers under every name."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _key_of(slots: Sequence[Slot], name: str) -> str:
    return next(slot.key for slot in slots if name in slot.names)
