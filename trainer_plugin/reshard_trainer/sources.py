"""Weight sources: which regions of the canonical tensors this trainer rank holds, and where.

A source describes; it never gathers. Coordinate space: global regions, local views. Not here: who
receives what (`reshard.plan`), how it travels.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from reshard.dtypes import DType, parse_dtype
from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard.layout.holding import TensorLayout
from reshard.layout.pieces import Piece
from reshard.layout.region import Region
from reshard.layout.table import PieceTable
from reshard.layout.view import StridedView
from reshard_trainer.dtensors import sharding_of
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.names import Rename, canonical_names, strip_wrappers


class WeightSource(Protocol):
    """What one trainer rank publishes."""

    @property
    def device(self) -> torch.device:
        """Where all its storages lie."""

    @property
    def table(self) -> PieceTable:
        """Where each held region lies; views are in elements of `storage(piece.storage)`."""

    @property
    def moves(self) -> int:
        """How often storages have moved: views made before the last time are of no use."""

    def layout(self) -> tuple[TensorLayout, ...]:
        """What this rank holds, sorted by name; a tensor of which it holds nothing, too.

        The same object as long as nothing has changed.
        """

    def storage(self, key: str) -> torch.Tensor:
        """The flat 1-d view of one storage, without gradients."""

    def refresh(self) -> None:
        """Look at the weights again, before a publish; layout and storages may have changed.

        Raises:
            LayoutError: weights that cannot be published; lists them all.
        """


class ModuleSource:
    """The parameters and persistent buffers of a plain, DDP, FSDP2, HSDP or TP module.

    Tied weights are offered under every name that the model has for them: an engine takes those
    that its own loader wants. Plain tensors count as replicas where several ranks have them.

    Attributes:
        device: where the local shards lie.
        table: this rank's pieces; a storage's key is the canonical name.
        moves: how often storages have moved.
    """

    device: torch.device
    table: PieceTable
    moves: int

    def __init__(
        self, model: torch.nn.Module, ensemble: Ensemble, *, rename: Rename = strip_wrappers
    ) -> None:
        """Describe `model`.

        Args:
            model: as the optimizer trains it, wrappers included.
            ensemble: the trainer's ranks.
            rename: from a name in `model` to the canonical (checkpoint) name.

        Raises:
            LayoutError: weights that cannot be published; lists them all.
        """
        self._model = model
        self._ensemble = ensemble
        self._rename = rename
        self._forms: dict[FQN, _Form] = {}
        self._flat: dict[FQN, torch.Tensor] = {}
        self._layout: tuple[TensorLayout, ...] = ()
        self.moves = 0
        self.refresh()

    def layout(self) -> tuple[TensorLayout, ...]:
        """What this rank holds, sorted by name."""
        return self._layout

    def storage(self, key: str) -> torch.Tensor:
        """The flat 1-d view of the storage of the tensor `key`."""
        return self._flat[FQN(key)]

    def refresh(self) -> None:
        """Find the weights where they now are."""
        _reshard(self._model)
        held = dict(_checkpoint_tensors(self._model))
        names = canonical_names(held, self._rename)
        tensors = {canonical: held[name] for name, canonical in names.items()}
        _refuse(tensors)
        forms = {name: _form(tensor) for name, tensor in tensors.items()}
        flat = {name: _flat(tensor) for name, tensor in tensors.items()}
        if _addresses(flat) != _addresses(self._flat):
            self.moves += 1
        self._flat = flat
        if forms != self._forms:
            self._describe(tensors)
            self._forms = forms

    def _describe(self, tensors: dict[FQN, torch.Tensor]) -> None:
        faults: list[str] = []
        pieces: dict[FQN, tuple[Piece, ...]] = {}
        for name, tensor in tensors.items():
            try:
                pieces[name] = _pieces(name, tensor, self._ensemble)
            except LayoutError as error:
                faults.append(f"{name}: {error}")
        if faults:
            raise LayoutError("these weights cannot be published", faults)
        self.table = PieceTable(pieces)
        self.device = next((_local(t).device for t in tensors.values()), torch.device("cpu"))
        self._layout = tuple(
            TensorLayout(name, tuple(t.shape), _dtype(t), self.table.regions(name))
            for name, t in sorted(tensors.items())
        )


_Form = tuple[object, ...]
"""All that the layout of a tensor follows from; equal forms, equal pieces."""


def _form(tensor: torch.Tensor) -> _Form:
    local = _local(tensor)
    mesh = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    strides = (tuple(local.shape), local.stride(), local.storage_offset())
    return (tuple(tensor.shape), tensor.dtype, local.device, mesh, strides)


def _addresses(flat: dict[FQN, torch.Tensor]) -> dict[FQN, tuple[int, int]]:
    return {name: (tensor.data_ptr(), tensor.numel()) for name, tensor in flat.items()}


def _reshard(model: torch.nn.Module) -> None:
    """Put FSDP2's shards back where a module was left unsharded, so that they are what we see."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _checkpoint_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under every name that they have."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer
        if isinstance(module, FullyShardedDataParallel):
            raise LayoutError(
                f"module {prefix or '(root)'} is wrapped by FullyShardedDataParallel (FSDP1), "
                "whose flat parameters are not supported; use fully_shard (FSDP2)"
            )


def _refuse(tensors: dict[FQN, torch.Tensor]) -> None:
    """Raise for weights that no transport can read, all of them, by name."""
    faults = [fault for name, tensor in tensors.items() for fault in _faults(name, tensor)]
    kinds = {_local(tensor).device.type for tensor in tensors.values()} - {"meta"}
    if len(kinds) > 1:
        faults += [
            f"{name}: on {_local(tensor).device}, but other weights are on a GPU; offload all of "
            "them or none"
            for name, tensor in tensors.items()
            if _local(tensor).device.type == "cpu"
        ]
    if faults:
        raise LayoutError("these weights cannot be published", faults)


def _faults(name: FQN, tensor: torch.Tensor) -> Iterator[str]:
    local = _local(tensor)
    if local.is_meta:
        yield f"{name}: on the meta device, without values; materialise it before attaching"
    if type(local) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        yield f"{name}: a {type(local).__name__}; only plain tensors and DTensors are known"
    elif local.layout is not torch.strided:
        yield f"{name}: of layout {local.layout}; only strided tensors can be published"
    try:
        _dtype(tensor)
    except LayoutError as error:
        yield f"{name}: {error}"


def _pieces(name: FQN, tensor: torch.Tensor, ensemble: Ensemble) -> tuple[Piece, ...]:
    local = _local(tensor)
    if not isinstance(tensor, DTensor):
        view = StridedView(int(local.storage_offset()), tuple(local.shape), local.stride())
        return (Piece(Region.whole(tuple(local.shape)), name, view),)
    sharding = sharding_of(tensor, ensemble)
    if tensor.device_mesh.get_coordinate() is None:
        return ()
    expected = sharding.local_shape(ensemble.rank)
    if tuple(local.shape) != expected:
        raise LayoutError(
            f"the local shard of {tensor.placements} is of shape {tuple(local.shape)}, the layout "
            f"algebra says {expected}"
        )
    contiguous = sharding.pieces(ensemble.rank, name)
    return tuple(_restride(piece, expected, local) for piece in contiguous)


def _restride(piece: Piece, shape: tuple[int, ...], local: torch.Tensor) -> Piece:
    """From a view of a contiguous local shard to one of the storage that really holds it."""
    rest, offset = piece.view.offset, int(local.storage_offset())
    dense = StridedView.contiguous(shape).stride
    for step, stride in zip(dense, local.stride(), strict=True):
        position, rest = divmod(rest, step)
        offset += position * stride
    return Piece(
        piece.region, piece.storage, StridedView(offset, piece.region.shape, local.stride())
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard on this rank, as it is stored."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage under the local shard, as 1-d, in elements of its dtype."""
    local = _local(tensor).detach()
    elements = local.untyped_storage().nbytes() // local.element_size()
    return local.as_strided((elements,), (1,), 0)


def _dtype(tensor: torch.Tensor) -> DType:
    return parse_dtype(str(tensor.dtype))
