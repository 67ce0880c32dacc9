"""Which live parameters still lie as the loader left them: the round trip.

The engine's checkpoint is loaded once more, into shadows in load layout, through the recorded map.
A parameter whose live bytes equal its shadow is *direct*. A layer whose post-load step, rehearsed
on the shadows, gives the live bytes and the live outputs is *repeatable*: those of its parameters
that differ from their shadows are *repacked*. Everything else is *refused*, by name. Where there is
no checkpoint (dummy weights), layers are rehearsed on made-up values instead: a step that leaves
every byte alone proves its parameters direct, one that gives the same twice proves itself
repeatable.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from reshard.ids import FQN
from reshard.session import TensorSpec
from reshard_vllm.install import checkpoint
from reshard_vllm.install.aliases import find_aliases
from reshard_vllm.install.evidence import Class, Proof
from reshard_vllm.install.fitting import vocabulary_of
from reshard_vllm.install.postload import Layer, Result, layers_of, rehearse, rehearsed
from reshard_vllm.install.shadow import Shadow, constants_of, coverage
from reshard_vllm.recording.loader_map import LoaderMap, layout_of
from reshard_vllm.recording.slots import Slot

logger = logging.getLogger(__name__)

_PROBE_ROWS = 3


def prove(model: torch.nn.Module, config: VllmConfig) -> Proof:
    """The round trip. To be called before anything but vLLM's loader has written the parameters.

    Raises:
        RecordingError: the engine's own loader cannot be recorded.
    """
    if checkpoint.can_read(config):
        specs = checkpoint.specs(config, model)
        recorded = layout_of(config, specs)
        shadow = Shadow(recorded, recorded.slots, torch.device("cpu"))
        _fill_from_checkpoint(shadow, recorded, model, config)
        return _Prover(model, config, recorded, shadow, specs).from_checkpoint()
    recorded = layout_of(config, ())
    shadow = Shadow(recorded, recorded.slots, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for key in recorded.slots:
        _scatter(shadow.tensor(key), generator)
    return _Prover(model, config, recorded, shadow, ()).from_rehearsal()


def _fill_from_checkpoint(
    shadow: Shadow, recorded: LoaderMap, model: torch.nn.Module, config: VllmConfig
) -> None:
    places = defaultdict(list)
    for landing in recorded.landings.landings:
        places[landing.name].append(landing.piece)
    for name, tensor in checkpoint.read(config, model):
        for piece in places.get(FQN(name), ()):
            box = tuple(map(slice, piece.region.offset, piece.region.end))
            shadow.place(piece.storage, piece.view).copy_(tensor[box])
    shadow.compute()


def _scatter(tensor: torch.Tensor, generator: torch.Generator) -> None:
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))


class _Prover:
    def __init__(
        self,
        model: torch.nn.Module,
        config: VllmConfig,
        recorded: LoaderMap,
        shadow: Shadow,
        specs: Sequence[TensorSpec],
    ) -> None:
        self._specs = specs
        self._model = model
        self._config = config
        self._recorded = recorded
        self._shadow = shadow
        self._live = dict(
            [
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            ]
        )
        self._layers = {
            f"{layer.name}!deferred" if layer.deferred else layer.name: layer
            for layer in layers_of(model)
        }
        self._classes: dict[str, Class] = {}
        self._aliases = find_aliases(recorded.slots, self._live)
        self._reasons = {**self._aliases.faults, **recorded.landings.refused}

    def from_checkpoint(self) -> Proof:
        covered = coverage(self._recorded)
        for key, slot in self._recorded.slots.items():
            if not covered[key] or self._intact(slot):
                self._classes[key] = "direct"
            if not covered[key] and self._same_layout(slot):
                # What no checkpoint fills has the constructor's values.
                self._shadow.tensor(key).copy_(self._live[key].detach())
        for layer in self._layers.values():
            if layer.deferred or any(covered[key] for key in self._keys(layer)):
                self._rehearse(layer, against_live=True)
        self._check_copies()
        self._refuse_rest("its live bytes differ from the checkpoint, no post-load step says why")
        return self._proof("checkpoint", covered)

    def from_rehearsal(self) -> Proof:
        for layer in self._layers.values():
            self._rehearse(layer, against_live=False)
        for key, slot in self._recorded.slots.items():
            if key not in {*self._classes, *self._reasons} and self._same_layout(slot):
                self._classes[key] = "direct"
        for key, names in self._aliases.apart.items():
            self._reasons[key] = f"the loader fills {names[0]} with it, live they are apart"
        self._refuse_rest("its live layout differs from the loader's, no post-load step says why")
        return self._proof("rehearsal", None)

    def _check_copies(self) -> None:
        """What the loader fills with a slot but lies apart live must hold the same elements."""
        for key, names in self._aliases.apart.items():
            for name in names:
                if not _equal(self._live[name].detach(), self._shadow.named(key, name)):
                    self._reasons[key] = f"{name}, filled with it by the loader, has other bytes"

    def _rehearse(self, layer: Layer, *, against_live: bool) -> None:
        """Classify the slots of one layer by what its post-load step does."""
        loaded = self._loaded(layer)
        try:
            result = rehearse(layer, self._config, loaded)
            if against_live:
                fault = self._differs_from_live(layer, result, loaded)
            else:
                fault = _differs(result, rehearse(layer, self._config, loaded))
        except Exception as error:
            fault = f"its post-load step cannot be repeated: {type(error).__name__}: {error}"
        for local, tensor in loaded.items():
            slot = self._slot_of(layer, local)
            if fault:
                self._reasons[slot.key] = fault
                continue
            made = result.parameters.get(local)
            unchanged = made is not None and _equal(made, tensor) and self._same_layout(slot)
            if unchanged and self._classes.get(slot.key) != "repacked":
                self._classes[slot.key] = "direct"
            else:
                self._classes[slot.key] = "repacked"

    def _differs_from_live(
        self, layer: Layer, result: Result, loaded: Mapping[str, torch.Tensor]
    ) -> str:
        live = {n: p.detach() for n, p in layer.module._parameters.items() if p is not None}
        if set(live) != set(result.parameters):
            return f"its post-load step makes {sorted(result.parameters)}, live are {sorted(live)}"
        for name, tensor in result.parameters.items():
            if not _equal(tensor, live[name]):
                return f"its post-load step does not give the live bytes of {name}"
        before = {n: t for n, t in layer.module.__dict__.items() if isinstance(t, torch.Tensor)}
        for name, tensor in result.tensors.items():
            if name in before and not _equal(tensor, before[name]):
                return f"its post-load step does not give the live bytes of {name}"
        return self._outputs_differ(layer, loaded)

    def _outputs_differ(self, layer: Layer, loaded: Mapping[str, torch.Tensor]) -> str:
        """Packed copies in handlers show only in what the layer computes."""
        weight = loaded.get("weight")
        if weight is None or weight.ndim != 2 or not hasattr(layer.module, "cpu_linear"):
            return ""
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(_PROBE_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
        live = self._apply(layer, probe)
        with rehearsed(layer, self._config, loaded):
            again = self._apply(layer, probe)
        return "" if torch.equal(live, again) else "its packed weight is not that of the checkpoint"

    def _apply(self, layer: Layer, probe: torch.Tensor) -> torch.Tensor:
        module = layer.module
        with set_current_vllm_config(self._config), torch.no_grad():
            method: QuantizeMethodBase = module.quant_method
            output: torch.Tensor = method.apply(module, probe)
        return output

    def _loaded(self, layer: Layer) -> dict[str, torch.Tensor]:
        """The layer's own slots, in load layout, by local name."""
        prefix = f"{layer.name}." if layer.name else ""
        loaded: dict[str, torch.Tensor] = {}
        for slot in self._recorded.slots.values():
            for name in slot.names:
                local = name.removeprefix(prefix)
                own = name.startswith(prefix) and "." not in local
                if own and local not in layer.module._buffers:
                    loaded[local] = self._shadow.tensor(slot.key)
        return loaded

    def _keys(self, layer: Layer) -> set[str]:
        """Slots that the layer's own parameters lie in."""
        return {self._slot_of(layer, local).key for local in self._loaded(layer)}

    def _slot_of(self, layer: Layer, local: str) -> Slot:
        name = layer.parameter_name(local)
        return next(slot for slot in self._recorded.slots.values() if name in slot.names)

    def _same_layout(self, slot: Slot) -> bool:
        live = self._live.get(slot.key)
        return (
            live is not None
            and tuple(live.shape) == slot.shape
            and tuple(live.stride()) == slot.stride
            and live.dtype == slot.dtype
        )

    def _intact(self, slot: Slot) -> bool:
        return self._same_layout(slot) and _equal(
            self._live[slot.key].detach(), self._shadow.tensor(slot.key)
        )

    def _refuse_rest(self, reason: str) -> None:
        for key in self._recorded.slots:
            if key in self._reasons:
                self._classes[key] = "refused"
            elif key not in self._classes:
                self._classes[key], self._reasons[key] = "refused", reason

    def _unfilled(self, covered: Mapping[str, int] | None) -> list[str]:
        """Slots that have what their constructor or their step gave them."""
        buffers = {name for name, _ in self._model.named_buffers(remove_duplicate=False)}
        return [
            key
            for key, kind in self._classes.items()
            if covered is not None and not covered[key] and key not in self._aliases.tied
            # Buffers outlive a sleeping engine: vLLM saves them.
            if kind == "repacked" or (kind == "direct" and key not in buffers)
        ]

    def _proof(
        self, basis: Literal["checkpoint", "rehearsal"], covered: Mapping[str, int] | None
    ) -> Proof:
        owners: dict[str, list[str]] = defaultdict(list)
        for name, layer in self._layers.items():
            for local in self._loaded(layer):
                owners[self._slot_of(layer, local).key].append(name)
        return Proof(
            basis,
            dict(self._classes),
            dict(self._reasons),
            dict(self._layers),
            {key: tuple(names) for key, names in owners.items()},
            covered,
            constants_of(self._recorded),
            {key: self._shadow.tensor(key).clone() for key in self._unfilled(covered)},
            self._aliases.apart,
            self._aliases.tied,
            tuple(spec.name for spec in self._specs),
            vocabulary_of(
                self._model, self._config, self._recorded, self._specs, self._aliases.tied
            ),
        )


def _differs(first: Result, second: Result) -> str:
    if set(first.parameters) != set(second.parameters):
        return "its post-load step makes other parameters each time"
    for name, tensor in first.parameters.items():
        if not _equal(tensor, second.parameters[name]):
            return f"its post-load step gives other bytes of {name} each time"
    return ""


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit equality, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
