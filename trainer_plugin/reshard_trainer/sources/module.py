"""The source of a `torch.nn.Module`: found, merged, renamed, transformed, adapted, described.

Each of these steps has a module of its own; here is their order, and what publishes share.
"""

from collections.abc import Mapping

import torch

from reshard.board import Deadline
from reshard.dtypes import DType, parse_dtype
from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard.layout.holding import TensorLayout
from reshard.layout.pieces import Piece
from reshard.layout.table import PieceTable
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.names import Rename, canonical_names, strip_wrappers
from reshard_trainer.sources.adapters import Adaptation, Automatic, choose
from reshard_trainer.sources.discovery import Parts, find, whole
from reshard_trainer.sources.held import Held
from reshard_trainer.sources.lora import Merger
from reshard_trainer.sources.recording import Adapter
from reshard_trainer.sources.transforms import Transform, Transforms


class ModuleSource:
    """The parameters and persistent buffers of a module.

    Plain, DDP, FSDP1, FSDP2, HSDP, tensor parallel and ZeRO-3 modules, wrappers at any depth, and
    any mix of them. Tied weights are offered under every name that the model has for them: an
    engine takes those that its own loader wants. Plain tensors of one name are replicas, whose
    equality is checked (`replicas=` of `attach`).

    Attributes:
        device: where the local shards lie.
        table: this rank's pieces; a storage's key is the trainer's name, wrappers stripped.
        moves: how often storages have moved.
    """

    device: torch.device
    table: PieceTable
    moves: int

    def __init__(
        self,
        model: torch.nn.Module,
        ensemble: Ensemble,
        *,
        rename: Rename = strip_wrappers,
        adapter: Adapter | Automatic | None = "auto",
        transforms: Mapping[str, Transform] | None = None,
        parts: Parts = whole,
    ) -> None:
        """Describe `model`.

        Args:
            model: as the optimizer trains it, wrappers included.
            ensemble: the trainer's ranks.
            rename: from a name in `model` to the global one; with `adapter`, to what it takes.
            adapter: from a state dict of global names to one of canonical (checkpoint) names, made
                of views, cat, stack, indexing and copies; run once, without values. `auto`: what
                transformers does when it saves this model; None: names are canonical already.
            transforms: arithmetic by pattern of the renamed name (`fnmatch`), on the rank's own
                elements.
            parts: which plain tensors are parts of larger ones.

        Raises:
            LayoutError: weights that cannot be published; lists them all.
        """
        self._model = model
        self._ensemble = ensemble
        self._rename = rename
        self._parts = parts
        self._merger = Merger(model, ensemble)
        self._transforms = Transforms(transforms or {})
        self._adaptation = Adaptation(choose(model, adapter))
        self._forms: dict[FQN, object] = {}
        self._flat: dict[str, torch.Tensor] = {}
        self._layout: tuple[TensorLayout, ...] = ()
        self.moves = 0
        self.refresh()

    def layout(self) -> tuple[TensorLayout, ...]:
        """What this rank holds, sorted by name."""
        return self._layout

    @property
    def unused(self) -> tuple[str, ...]:
        """Patterns of transforms that fit no tensor of this rank."""
        return tuple(f"transforms: {pattern!r}" for pattern in self._transforms.unused)

    @property
    def prepares(self) -> bool:
        """Whether there are adapters to merge, or transforms to apply."""
        return self._merger.adapted or self._transforms.any

    def storage(self, key: str) -> torch.Tensor:
        """The flat 1-d view of the storage of the tensor `key`."""
        return self._flat[key]

    def refresh(self) -> None:
        """Find the weights where they now are."""
        found = self._merger.merged(find(self._model, self._ensemble, self._parts))
        names = canonical_names(found, self._rename)
        held = {canonical: found[name] for name, canonical in names.items()}
        held = self._transforms.applied(held)
        _refuse_two_devices(held)
        flat = {str(name): tensor.flat for name, tensor in held.items()}
        if _addresses(flat) != _addresses(self._flat):
            self.moves += 1
        self._flat = flat
        forms = {name: tensor.form for name, tensor in held.items()}
        if forms != self._forms:
            self._describe(held)
            self._forms = forms

    def prepare(self, deadline: Deadline) -> None:
        """Merge adapters and apply transforms to the present values."""
        self._merger.compute(deadline)
        self._transforms.compute()

    def _describe(self, held: Mapping[FQN, Held]) -> None:
        adapted = self._adaptation.describe(held)
        pieces = {
            name: tuple(Piece(region, key, view) for key, region, view in tensor.places)
            for name, tensor in adapted.items()
        }
        self.table = PieceTable(pieces)
        self.device = next((tensor.flat.device for tensor in held.values()), torch.device("cpu"))
        layout = tuple(
            TensorLayout(name, tensor.shape, _dtype(tensor.dtype), self.table.regions(name))
            for name, tensor in sorted(adapted.items())
        )
        if layout != self._layout:
            self._layout = layout


def _addresses(flat: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (tensor.data_ptr(), tensor.numel()) for name, tensor in flat.items()}


def _refuse_two_devices(held: Mapping[FQN, Held]) -> None:
    if len({tensor.flat.device.type for tensor in held.values()}) > 1:
        raise LayoutError(
            "these weights cannot be published",
            (
                f"{name}: on {tensor.flat.device}, but other weights are on a GPU; offload all of "
                "them or none"
                for name, tensor in held.items()
                if tensor.flat.device.type == "cpu"
            ),
        )


def _dtype(dtype: torch.dtype) -> DType:
    return parse_dtype(str(dtype))
