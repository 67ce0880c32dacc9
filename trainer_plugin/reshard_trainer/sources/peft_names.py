"""PEFT's wrappers in a model: which adapters count at the moment, and what names mean without them.

PEFT is looked up only where it has been imported by the trainer. Not here: the arithmetic
(`lora.py`).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard_trainer.names import WRAPPERS


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter of one weight: `scaling * second @ first` is added to it.

    Attributes:
        first: name of the factor [rank, in].
        second: name of the factor [out, rank].
        scaling: number.
        transposed: whether the product is transposed before it is added.
        rounded: whether the product is rounded to the weight's dtype before it is added.
    """

    first: str
    second: str
    scaling: float
    transposed: bool
    rounded: bool


@dataclass(slots=True)
class Wrapping:
    """What PEFT did to a model; names are the trainer's, wrappers stripped.

    Attributes:
        prefixes: what stands for what at the beginning of a name; the longest counts, and None
            drops the tensor.
        added: adapters by weight, in order.
        faults: what cannot be merged.
    """

    prefixes: dict[str, str | None] = field(default_factory=dict)
    added: dict[str, list[LowRank]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def plain(self, name: str) -> str | None:
        """A tensor's name without PEFT; None for one that is PEFT's own."""
        path = name.split(".")
        for end in range(len(path), 0, -1):
            prefix = ".".join(path[:end]) + "."
            if prefix in self.prefixes:
                to = self.prefixes[prefix]
                return None if to is None else self.plain_head(to) + name.removeprefix(prefix)
        return name

    def plain_head(self, prefix: str) -> str:
        """A module's prefix without PEFT."""
        known = [head for head in self.prefixes if prefix.startswith(head) and head != prefix]
        for head in sorted(known, key=len, reverse=True):
            to = self.prefixes[head]
            if to is not None and to != head:
                return self.plain_head(to + prefix.removeprefix(head))
        return prefix


def wrapping(model: torch.nn.Module) -> Wrapping | None:
    """What PEFT did to `model`; None if nothing."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return None
    found = Wrapping()
    seen = False
    for name, module in model.named_modules(remove_duplicate=False):
        path = _stripped(name)
        if isinstance(module, sys.modules["peft.peft_model"].PeftModel):
            seen = True
            _of_model(found, path, module)
        elif isinstance(module, tuners.BaseTunerLayer):
            seen = True
            _of_layer(found, path, module)
        elif isinstance(module, sys.modules["peft.utils.other"].AuxiliaryTrainingWrapper):
            seen = True
            _of_trained_copy(found, path, module)
    return found if seen else None


def _stripped(path: str) -> str:
    """A module's path without wrappers, with a dot at its end if it is not the root."""
    kept = [part for part in path.split(".") if part and part not in WRAPPERS]
    return "".join(f"{part}." for part in kept)


def _of_model(found: Wrapping, path: str, module: Any) -> None:
    if module.active_peft_config.is_prompt_learning:
        found.faults.append(
            f"{path or 'the model'}: prompt learning adds no weights that an engine could load"
        )
        return
    found.prefixes[f"{path}base_model.model."] = path


def _of_layer(found: Wrapping, path: str, module: Any) -> None:
    found.prefixes[path] = None
    found.prefixes[f"{path}base_layer."] = path
    name = path.removesuffix(".")
    layers = sys.modules["peft.tuners.lora.layer"]
    linear = isinstance(module, layers.Linear)
    if not linear and not isinstance(module, layers.Embedding):
        found.faults.append(
            f"{name}: adapted by {type(module).__module__}.{type(module).__name__}; only LoRA of "
            "linear and embedding layers is merged"
        )
        return
    if isinstance(module.base_layer, sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer):
        found.faults.append(f"{name}: adapters within adapters are not merged")
        return
    if module.merged:
        # PEFT has added them into the weight itself, and ignores the active ones.
        return
    if module.disable_adapters:
        found.faults.append(f"{name}: its adapters are disabled; enable them before publishing")
        return
    found.added[f"{name}.base_layer.weight"] = list(_adapters(found, name, module, linear))


def _adapters(found: Wrapping, name: str, module: Any, linear: bool) -> Iterator[LowRank]:
    factors = module.lora_A if linear else module.lora_embedding_A
    for adapter in module.active_adapters:
        if adapter not in factors:
            continue
        if adapter in getattr(module, "lora_variant", {}):
            kind = type(module.lora_variant[adapter]).__name__
            found.faults.append(f"{name}: adapter {adapter} is a {kind}, not plain LoRA")
        elif linear and module.lora_bias.get(adapter):
            found.faults.append(f"{name}: adapter {adapter} has a bias, which is not merged")
        elif linear:
            first, second = f"{name}.lora_A.{adapter}.weight", f"{name}.lora_B.{adapter}.weight"
            turned = bool(module.fan_in_fan_out)
            yield LowRank(first, second, module.scaling[adapter], turned, False)
        else:
            first, second = (f"{name}.lora_embedding_{side}.{adapter}" for side in "AB")
            yield LowRank(first, second, module.scaling[adapter], True, True)


def _of_trained_copy(found: Wrapping, path: str, module: Any) -> None:
    """A module that is trained whole, as a copy beside the original."""
    copies = sys.modules["peft.utils.other"].ModulesToSaveWrapper
    if not isinstance(module, copies):
        found.faults.append(
            f"{path.removesuffix('.')}: a {type(module).__name__}; only modules_to_save is known"
        )
        return
    found.prefixes[path] = None
    if module.disable_adapters or not module.active_adapters:
        found.prefixes[f"{path}original_module."] = path
    else:
        found.prefixes[f"{path}modules_to_save.{module.active_adapters[0]}."] = path
