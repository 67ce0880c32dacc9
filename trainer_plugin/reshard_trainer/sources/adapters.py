"""From a trainer's tensors to canonical ones: which adapter, and what it makes of a rank's part."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard.layout.align import Holdings
from reshard.layout.region import Region
from reshard.layout.view import StridedView
from reshard_trainer.sources import recording
from reshard_trainer.sources.checkpoint_names import conversion_of
from reshard_trainer.sources.held import Held
from reshard_trainer.sources.recording import Adapter

Automatic = Literal["auto"]


def choose(model: torch.nn.Module, adapter: Adapter | Automatic | None) -> Adapter | None:
    """The adapter that was given, or the one that the model brings."""
    return conversion_of(model) if adapter == "auto" else adapter


@dataclass(frozen=True, slots=True)
class Canonical:
    """One canonical tensor, as far as this rank has it.

    Attributes:
        shape: of the whole tensor, in elements.
        dtype: of it.
        places: held regions: key of the storage, global region, local view.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    places: tuple[tuple[str, Region, StridedView], ...]


class Adaptation:
    """An adapter, run again only where it is given other tensors."""

    def __init__(self, adapter: Adapter | None) -> None:
        self._adapter = adapter
        self._given: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._adapted: dict[str, recording.Adapted] = {}

    def describe(self, held: Mapping[FQN, Held]) -> dict[FQN, Canonical]:
        """The canonical tensors, by name.

        Raises:
            LayoutError: tensors that lie in a way that is not understood, or an adapter that does
                more than move elements; lists them all.
        """
        pieces, faults = {}, []
        for name, tensor in held.items():
            try:
                pieces[name] = tensor.places.pieces()
            except LayoutError as error:
                faults.append(f"{name}: {error}")
        if faults:
            raise LayoutError("these weights cannot be published", faults)
        if self._adapter is None:
            return {
                name: Canonical(
                    tensor.shape,
                    tensor.flat.dtype,
                    tuple((name, region, view) for region, view in pieces[name]),
                )
                for name, tensor in held.items()
            }
        self._record(self._adapter, held)
        holdings = {name: Holdings(held[name].shape, pieces[name]) for name in held}
        return {FQN(name): _through(tensor, holdings) for name, tensor in self._adapted.items()}

    def _record(self, adapter: Adapter, held: Mapping[FQN, Held]) -> None:
        given = {str(name): (tensor.shape, tensor.flat.dtype) for name, tensor in held.items()}
        if given != self._given:
            self._adapted = recording.record(adapter, given)
            self._given = given


def _through(tensor: recording.Adapted, holdings: Mapping[FQN, Holdings]) -> Canonical:
    places: dict[tuple[str, Region], StridedView] = {}
    for name, same in tensor.origins:
        for region, view in holdings[FQN(name)].follow(tensor.shape, same):
            places[name, region] = view
    held = tuple((name, region, view) for (name, region), view in places.items())
    return Canonical(tensor.shape, tensor.dtype, held)
