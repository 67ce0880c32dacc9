"""One rank of a model: record, prove, refit with index-coded tensors, compare, go back."""

import functools
from collections import defaultdict
from collections.abc import Iterable

import msgspec
import torch
from vllm.config import VllmConfig

from reshard.errors import RecordingError
from reshard.session import Install, TensorSpec
from reshard_vllm.inspect import loading
from reshard_vllm.inspect.codes import coded
from reshard_vllm.inspect.messages import Place, RankReport
from reshard_vllm.inspect.state import addresses, differences, state_of
from reshard_vllm.install import checkpoint
from reshard_vllm.install.classes import class_bytes, find_faults, kind_of
from reshard_vllm.install.evidence import Proof
from reshard_vllm.install.installer import VllmInstaller
from reshard_vllm.install.proof import prove
from reshard_vllm.recording.landing import slot_of
from reshard_vllm.recording.loader_map import LoaderMap, layout_of

_INSTALLS: tuple[Install, ...] = ("staged", "in_place")


def inspect_rank(config: VllmConfig, *, verify: bool, codings: int) -> RankReport:
    """Everything that there is to say about the rank that `config` is of.

    Args:
        config: of the rank's worker; vLLM's groups exist.
        verify: whether to refit and compare.
        codings: how many different codings to refit with.
    """
    model = loading.load(config)
    untouched = state_of(model, config)
    specs = checkpoint.specs(config, model)
    try:
        proof = prove(model, config)
        recorded = layout_of(config, specs)
    except RecordingError as error:
        faults = error.faults or (str(error),)
        refused = {name: why or str(error) for name, _, why in (f.partition(": ") for f in faults)}
        return RankReport(config.parallel_config.rank, type(model).__name__, refused=refused)
    report = _describe(config.parallel_config.rank, model, recorded, proof, specs)
    if not verify or report.refused or report.uncovered:
        return report
    seeds = tuple(range(1, 1 + codings))
    found = [f"recording: {line}" for line in differences(state_of(model, config), untouched)]
    found += _verify(model, config, recorded, proof, specs, seeds)
    return msgspec.structs.replace(report, differences=tuple(found), verified=True)


def _describe(
    rank: int,
    model: torch.nn.Module,
    recorded: LoaderMap,
    proof: Proof,
    specs: Iterable[TensorSpec],
) -> RankReport:
    faults = find_faults(recorded, proof, model)
    counts = class_bytes(recorded, proof, specs)
    places: dict[str, dict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))
    for landing in recorded.landings.landings:
        place = Place(
            slot_of(landing.piece.storage),
            kind_of(recorded, proof, landing.piece.storage),
            str(landing.dtype).removeprefix("torch."),
            ((landing.piece.region.offset, landing.piece.region.shape),),
        )
        places[landing.name][place.parameter].append(place)
    return RankReport(
        rank=rank,
        model_class=type(model).__name__,
        basis=proof.basis,
        direct_bytes=counts["direct"],
        repacked_bytes=counts["repacked"],
        computed_bytes=counts["computed"],
        refused_bytes=counts["refused"],
        refused=dict(faults.refused),
        excess={
            key: f"{excess.nbytes} bytes: {', '.join(excess.operations)} of all of "
            + ", ".join(excess.names)
            for key, excess in recorded.landings.excess.items()
        },
        uncovered=dict(faults.uncovered),
        unused=recorded.unused,
        tensors={
            name: tuple(_merged(several) for several in by_parameter.values())
            for name, by_parameter in places.items()
        },
    )


def _merged(places: list[Place]) -> Place:
    boxes = tuple(box for place in places for box in place.boxes)
    first = places[0]
    return Place(first.parameter, first.kind, first.dtype, boxes)


def _verify(
    model: torch.nn.Module,
    config: VllmConfig,
    recorded: LoaderMap,
    proof: Proof,
    specs: tuple[TensorSpec, ...],
    seeds: tuple[int, ...],
) -> list[str]:
    """Refit with each coding and with the checkpoint, in both modes; what differs from vLLM's.

    The checkpoint comes last in each mode, after all parameters have lost their values.
    """
    start = state_of(loading.load_checkpoint(config), config)
    places = addresses(model)
    equal = _equal_names(recorded, proof)
    codings = {seed: functools.partial(coded, specs, seed, equal) for seed in seeds}
    fresh = {
        seed: state_of(loading.load_given(config, tensors()), config)
        for seed, tensors in codings.items()
    }
    found = []
    for install in _INSTALLS:
        installer = VllmInstaller(model, config, recorded, proof, specs, install=install)
        for seed, tensors in codings.items():
            write(installer, tensors())
            lines = differences(state_of(model, config), fresh[seed])
            found += [f"{install}, coding {seed}: {line}" for line in lines]
        _lose_parameters(model)
        write(installer, checkpoint.read(config, model))
        lines = differences(state_of(model, config), start)
        found += [f"{install}, back to the checkpoint: {line}" for line in lines]
        moved = [name for name, address in addresses(model).items() if places[name] != address]
        found += [f"{install}: {name} moved in memory" for name in moved]
    return found


def _lose_parameters(model: torch.nn.Module) -> None:
    """As an engine that slept (level 2) and woke: all that it gets back are its buffers."""
    for parameter in model.parameters():
        parameter.data.fill_(float("nan") if parameter.is_floating_point() else 1)


def _equal_names(recorded: LoaderMap, proof: Proof) -> dict[str, str]:
    """Checkpoint tensors that must stay equal: vLLM tied what they are loaded into."""
    names = {slot_of(x.piece.storage): x.name for x in recorded.landings.landings}
    return {
        names[key]: names[first]
        for key, first in proof.tied.items()
        if key in names and first in names
    }


def write(installer: VllmInstaller, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """One refit by hand: what this rank needs of each tensor, then the commit."""
    needs = defaultdict(list)
    for need in installer.needs():
        needs[need.name].append(need)
    installer.begin()
    for name, tensor in tensors:
        for need in needs.get(name, ()):  # type: ignore[call-overload]
            for region in need.regions:
                sent = tensor[tuple(map(slice, region.offset, region.end))]
                sent = sent.to(getattr(torch, need.dtype))
                for part, view in installer.write(need.name, need.dtype, region):
                    box = zip(part.offset, region.offset, part.shape, strict=True)
                    view.copy_(sent[tuple(slice(at - base, at - base + n) for at, base, n in box)])
    installer.commit()
