"""The loader's map of one rank: each checkpoint tensor's places, by recording.

Everything here is about the *load layout*: the storages as the loader fills them, before vLLM's
post-load steps. Which live storage still has that layout is for `install` to prove.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_flatten
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
    if vllm_config.parallel_config.enable_eplb:
        raise RecordingError(
            "expert load balancing moves experts while the engine runs, so no map of them lasts; "
            "start the engine without --enable-eplb"
        )
    skeleton = build_skeleton(vllm_config)
    refuse_online_quantization(skeleton)
    with set_current_vllm_config(vllm_config):
        return record(skeleton, specs)


def record(skeleton: torch.nn.Module, specs: Sequence[TensorSpec]) -> LoaderMap:
    """Record what `skeleton.load_weights` does with `specs`; no storage of it is written.

    Raises:
        RecordingError: the loader rejects a tensor, or does what cannot be followed.
    """
    sources = [
        torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
    ]
    # Aliases: a loader may give the tensor objects themselves another shape.
    given = [tensor.detach() for tensor in sources]
    tape = Tape(sources, list(skeleton.parameters()), list(skeleton.buffers()))
    _run_loader(skeleton, zip((spec.name for spec in specs), given, strict=True), tape)
    owned = dict(owned_of(skeleton))
    slots = slots_of(owned.items())
    by_storage = {storage_of(owned[slot.key]): (slot.key, owned[slot.key]) for slot in slots}
    by_source = {storage_of(t): (FQN(spec.name), t) for spec, t in zip(specs, sources, strict=True)}
    landings = resolve(tape, by_source, by_storage)
    _refuse_hoards(skeleton, tape, by_storage)
    landed = {landing.name for landing in landings.landings}
    unused = tuple(sorted(FQN(spec.name) for spec in specs if FQN(spec.name) not in landed))
    return LoaderMap({slot.key: slot for slot in slots}, landings, unused)


def _run_loader(
    skeleton: torch.nn.Module, named: Iterable[tuple[str, torch.Tensor]], tape: Tape
) -> None:
    try:
        with torch.no_grad(), tape:
            skeleton.load_weights(named)  # type: ignore[operator]
    except RecordingError as error:
        raise RecordingError(f"{type(skeleton).__name__}: {error}") from error
    except Exception as error:
        raise RecordingError(
            f"{type(skeleton).__name__}'s loader rejects the trainer's tensors: "
            f"{type(error).__name__}: {error}"
        ) from error


def _refuse_hoards(skeleton: torch.nn.Module, tape: Tape, owned: Collection[int]) -> None:
    """Weights that a loader keeps in plain attributes are reached by no map."""
    kept = [
        f"{name}.{attribute}".lstrip(".")
        for name, module in skeleton.named_modules()
        for attribute, value in module.__dict__.items()
        if attribute not in ("_parameters", "_buffers", "_modules")
        for tensor in tree_flatten(value)[0]
        if isinstance(tensor, torch.Tensor)
        and storage_of(tensor) not in owned
        and tape.kinds.get(storage_of(tensor)) in ("source", "temporary", "foreign")
    ]
    if kept:
        raise RecordingError(
            f"{type(skeleton).__name__}'s loader keeps weights outside of parameters and buffers",
            kept,
        )


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


def owned_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers under every name."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
