"""LoRA merged on the fly: each rank adds the product of the factors to its own elements, in a copy.

The trainer's weights are only read. A rank needs those rows of one factor and those columns of the
other that its own elements depend on; what it does not hold of them (FSDP2 cuts both factors) is
gathered from the ranks that do. The factors are small; the weights never travel.
Coordinate space: global regions of weights and factors. Not here: PEFT's objects (`peft_names.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from reshard.board import Deadline
from reshard.errors import LayoutError
from reshard.layout.region import Region
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.names import strip_wrappers
from reshard_trainer.sources.factors import Factors
from reshard_trainer.sources.held import Held, packed
from reshard_trainer.sources.peft_names import LowRank, wrapping


@dataclass(frozen=True, slots=True)
class _Merge:
    """One weight to merge.

    Attributes:
        weight: as the trainer has it.
        added: its adapters.
        result: a copy of this rank's part, that is published.
    """

    weight: Held
    added: tuple[LowRank, ...]
    result: Held


class Merger:
    """Takes PEFT out of a model's tensors; does nothing where there is none."""

    def __init__(self, model: torch.nn.Module, ensemble: Ensemble) -> None:
        self._model = model
        self._ensemble = ensemble
        self._merges: dict[str, _Merge] = {}
        self._factors: dict[str, Held] = {}
        self._wrapped = False

    def merged(self, found: Mapping[str, Held]) -> dict[str, Held]:
        """The tensors as they were without PEFT, adapted weights as buffers for `compute` to fill.

        Args:
            found: by the trainer's name.

        Returns:
            the tensors, by the trainer's name without PEFT's parts.

        Raises:
            LayoutError: adapters that cannot be merged; lists them all.
        """
        peft = wrapping(self._model)
        self._wrapped = peft is not None
        if peft is None:
            return dict(found)
        if peft.faults:
            raise LayoutError("these adapters cannot be merged; nothing was sent", peft.faults)
        stripped = {strip_wrappers(name): tensor for name, tensor in found.items()}
        self._factors = {
            name: stripped[name]
            for added in peft.added.values()
            for adapter in added
            for name in (adapter.first, adapter.second)
        }
        kept = {name: plain for name in stripped if (plain := peft.plain(name)) is not None}
        merges = {}
        result: dict[str, Held] = {}
        for name, plain in kept.items():
            adapters = tuple(peft.added.get(name, ()))
            if adapters:
                merges[plain] = self._merge(plain, stripped[name], adapters)
            if plain in result:
                raise LayoutError(f"{plain}: two tensors get this name once PEFT is taken out")
            result[plain] = merges[plain].result if adapters else stripped[name]
        self._merges = merges
        return result

    @property
    def adapted(self) -> bool:
        """Whether PEFT has wrapped the model."""
        return self._wrapped

    def compute(self, deadline: Deadline) -> None:
        """Merge the present values.

        Raises:
            ReshardError: not all ranks came, or nobody holds some part of a factor.
        """
        if not self._wrapped:
            return
        factors = Factors(self._factors, self._needs())
        with torch.no_grad():
            gathered = factors.gathered(self._ensemble, deadline)
            for merge in self._merges.values():
                _compute(merge, gathered)

    def _merge(self, name: str, weight: Held, added: tuple[LowRank, ...]) -> _Merge:
        known = self._merges.get(name)
        if known is not None and known.weight.form == weight.form:
            return _Merge(weight, added, known.result)
        places, count = packed(region for region, _ in weight.places.pieces())
        flat = torch.zeros(count, dtype=weight.flat.dtype, device=weight.flat.device)
        return _Merge(weight, added, Held(weight.shape, flat, places))

    def _needs(self) -> dict[str, list[Region]]:
        """Which regions of the factors this rank's elements depend on."""
        needs: dict[str, list[Region]] = {name: [] for name in self._factors}
        for merge in self._merges.values():
            for region, _ in merge.weight.places.pieces():
                for adapter in merge.added:
                    rank = self._factors[adapter.first].shape[0]
                    first, second = _factor_regions(region, adapter, rank)
                    needs[adapter.first].append(first)
                    needs[adapter.second].append(second)
        return needs


def _factor_regions(region: Region, adapter: LowRank, rank: int) -> tuple[Region, Region]:
    """The columns of the first factor and the rows of the second that a region depends on."""
    rows, columns = zip(region.offset, region.shape, strict=True)
    if adapter.transposed:
        rows, columns = columns, rows
    return Region((0, columns[0]), (rank, columns[1])), Region((rows[0], 0), (rows[1], rank))


def _compute(merge: _Merge, factors: Mapping[str, torch.Tensor]) -> None:
    for (region, values), (_, target) in zip(
        merge.weight.views(), merge.result.views(), strict=True
    ):
        target.copy_(values)
        for adapter in merge.added:
            first, second = factors[adapter.first], factors[adapter.second]
            delta = _product(region, adapter, first, second)
            target += delta.to(target.dtype) if adapter.rounded else delta


def _product(
    region: Region, adapter: LowRank, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """What an adapter adds to `region`, in PEFT's own order of operations."""
    columns, rows = _factor_regions(region, adapter, first.shape[0])
    first = first[:, columns.offset[1] : columns.end[1]]
    second = second[rows.offset[0] : rows.end[0]]
    dtype = second.dtype
    # As PEFT does: on CPUs the product of 16-bit factors is made in fp32, and rounded.
    if second.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        first, second = first.float(), second.float()
    product = second @ first
    if adapter.transposed:
        product = product.T
    return (product * adapter.scaling).to(dtype)
