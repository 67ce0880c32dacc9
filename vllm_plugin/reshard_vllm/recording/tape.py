"""The tape: every operation of a loader that touches a checkpoint tensor or a parameter.

A `TorchDispatchMode` notes the operations of one `load_weights` call: those that write storage
owned by the model (never executed on real storage), and those that make new tensors out of
checkpoint tensors. Views need no note: a view's storage, offset and strides say it all.
Not here: what the notes mean (`landings.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from reshard.errors import RecordingError
from reshard.layout.view import StridedView

Kind = Literal["source", "owned", "temporary", "constant"]

_WITHOUT_EXECUTION = frozenset({"copy_", "fill_", "zero_"})


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, for as long as the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor as an operation sees it: a strided view of some storage.

    Attributes:
        kind: of the storage: a checkpoint tensor, a parameter, an intermediate, or plain data.
        storage: identity of the storage.
        view: in elements of the storage.
        dtype: of the elements.
        constant: the data, where `kind` is `constant`.
    """

    kind: Kind
    storage: int
    view: StridedView
    dtype: torch.dtype
    constant: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Note:
    """One operation.

    Attributes:
        operation: the ATen overload.
        args: positional arguments, tensors replaced by `Ref`.
        kwargs: keyword arguments, likewise.
        written: what it writes in place; None for an operation that makes new tensors.
        made: storages of the new tensors, in order of the outputs.
    """

    operation: torch._ops.OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    written: Ref | None
    made: tuple[int, ...]

    @property
    def name(self) -> str:
        """`copy_`, `clone`, ... without namespace and overload."""
        return str(self.operation._schema.name.removeprefix("aten::"))

    def refs(self) -> list[Ref]:
        """All tensors among the arguments."""
        flat, _ = tree_flatten((self.args, dict(self.kwargs)))
        return [leaf for leaf in flat if isinstance(leaf, Ref)]


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records while entered.

    Attributes:
        notes: the operations, in order.
    """

    def __init__(self, sources: Sequence[torch.Tensor], owned: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: list[Note] = []
        self._kinds: dict[int, Kind] = {storage_of(t): "owned" for t in owned}
        self._kinds |= {storage_of(t): "source" for t in sources}
        # Identities are only unique among living storages.
        self._alive: list[torch.Tensor] = [*sources, *owned]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _moves_real_to_meta(func, args, kwargs):
            # Code that follows its parameter's device would lose data that is really there.
            kwargs["device"] = args[0].device
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        if not any(self._known(t) for t in tensors):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if written is not None:
            return self._write(func, written, args, kwargs)
        made = func(*_on_one_device(args), **kwargs)
        outputs = [t for t in tree_flatten(made)[0] if isinstance(t, torch.Tensor)]
        known = {storage_of(t) for t in tensors}
        fresh = [t for t in outputs if storage_of(t) not in known]
        if fresh:
            self._note(func, args, kwargs, None, tuple(storage_of(t) for t in outputs))
            for tensor in fresh:
                self._kinds[storage_of(tensor)] = "temporary"
        self._alive += outputs
        return made

    def _write(
        self,
        func: torch._ops.OpOverload,
        written: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Note a write; run it on meta storage only, where it checks shapes and changes nothing."""
        kind = self._kinds.setdefault(storage_of(written), "owned")
        self._alive.append(written)
        self._note(func, args, kwargs, self._ref(written), ())
        if written.is_meta:
            func(*_on_one_device(args), **kwargs)
        elif kind == "owned":
            _check_shapes(func, args)
        else:
            raise RecordingError(f"{func} writes an intermediate with real data: {kind}")
        return written

    def _note(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Ref | None,
        made: tuple[int, ...],
    ) -> None:
        def reference(leaf: object) -> object:
            return self._ref(leaf) if isinstance(leaf, torch.Tensor) else leaf

        self.notes.append(
            Note(func, tree_map(reference, args), tree_map(reference, kwargs), written, made)
        )

    def _known(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._kinds

    def _ref(self, tensor: torch.Tensor) -> Ref:
        storage = storage_of(tensor)
        kind = self._kinds.get(storage, "constant")
        self._alive.append(tensor)
        view = StridedView(
            int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
        )
        held = tensor.detach() if kind == "constant" else None
        return Ref(kind, storage, view, tensor.dtype, held)


def _written(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """The tensor that `func` writes in place, if any."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor):
                return value
    return None


def _moves_real_to_meta(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    target = kwargs.get("device")
    return (
        func._schema.name == "aten::_to_copy"
        and target is not None
        and torch.device(target).type == "meta"
        and not args[0].is_meta
    )


def _on_one_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Real operands of meta operations become meta: only shapes matter."""
    flat, _ = tree_flatten(args)
    if not any(isinstance(t, torch.Tensor) and t.is_meta for t in flat):
        return args

    def move(leaf: object) -> object:
        real = isinstance(leaf, torch.Tensor) and not leaf.is_meta
        return torch.empty_like(leaf, device="meta") if real else leaf  # type: ignore[arg-type]

    moved: tuple[Any, ...] = tree_map(move, args)
    return moved


def _check_shapes(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """What executing the write would have checked."""
    name = func._schema.name.removeprefix("aten::")
    if name not in _WITHOUT_EXECUTION:
        raise RecordingError(f"{func} writes a parameter in a way that is not understood")
    if name == "copy_":
        torch.empty(args[0].shape, device="meta").copy_(torch.empty(args[1].shape, device="meta"))
