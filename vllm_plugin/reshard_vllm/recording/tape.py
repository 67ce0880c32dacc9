"""The tape: every operation of a loader that touches a checkpoint tensor or a parameter.

A `TorchDispatchMode` notes the operations of one `load_weights` call: those that write storage
that the model or the loader owns (none is executed), and those that make new tensors out of
checkpoint tensors. Views need no note: a view's storage, offset and strides say it all.
Not here: whose a storage is in the end (`settle.py`), and what the notes mean (`landings.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from reshard.errors import RecordingError
from reshard.layout.view import StridedView

Kind = Literal["source", "owned", "foreign", "temporary", "constant"]

INDEX_ARGUMENTS: Final[Mapping[str, int]] = {
    "index": 1,
    "index_put_": 1,
    "index_select": 2,
    "index_copy_": 2,
    "gather": 2,
}
"""Position of the argument that says where, not what."""


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, for as long as the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor as an operation sees it: a strided view of some storage.

    Attributes:
        kind: of the storage: a checkpoint tensor, a parameter, one of neither that is written, an
            intermediate, or plain data.
        storage: identity of the storage.
        view: in elements of `dtype`, of the storage.
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
        made: the outputs, in order; None for one that is a view of an argument.
    """

    operation: torch._ops.OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    written: Ref | None = None
    made: tuple[Ref | None, ...] = ()

    @property
    def name(self) -> str:
        """`copy_`, `clone`, ... without namespace and overload."""
        return name_of(self.operation)

    def refs(self) -> list[Ref]:
        """All tensors among the arguments."""
        flat, _ = tree_flatten((self.args, dict(self.kwargs)))
        return [leaf for leaf in flat if isinstance(leaf, Ref)]


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records while entered.

    Attributes:
        notes: the operations, in order.
        born: storages that were made while recording.
        kinds: by storage, as far as known while recording.
        owned: parameters and buffers as they are when recording begins.
    """

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Aliases: a loader may give the tensor objects themselves other storage, or another shape.
        sources = [tensor.detach() for tensor in sources]
        parameters = [tensor.detach() for tensor in parameters]
        buffers = [tensor.detach() for tensor in buffers]
        self.owned = (*parameters, *buffers)
        self.notes: list[Note] = []
        self.born: set[int] = set()
        self.kinds: dict[int, Kind] = {storage_of(t): "owned" for t in self.owned}
        self.kinds |= {storage_of(t): "source" for t in sources}
        self._sources = {storage_of(t): t for t in sources}
        # A buffer with data has what its constructor gave it (an expert map), until it is written.
        self._given = {storage_of(t) for t in buffers if not t.is_meta}
        # Identities are only unique among living storages.
        self._alive: list[torch.Tensor] = [*sources, *self.owned]

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
            return args[0].to(kwargs.get("dtype") or args[0].dtype)
        tensors = _tensors((args, kwargs))
        written = _written(func, args, kwargs)
        if written is not None and self._is_concerned(tensors, written):
            if torch.Tag.inplace_view in func.tags:
                return _change_shape(func, args, kwargs)
            return self._write(func, written, args, kwargs)
        if not any(self._is_tracked(t) for t in tensors):
            made = func(*args, **kwargs)
            if any(t.is_meta for t in _tensors(made)):
                self._make(func, args, kwargs, made, tensors)
            self.born.update(map(storage_of, _tensors(made)))
            self._alive += _tensors(made)
            return made
        self._refuse_values(func, args)
        made = _run(func, args, kwargs)
        self._make(func, args, kwargs, made, tensors)
        return made

    def source(self, storage: int) -> Ref:
        """A whole checkpoint tensor."""
        return self._ref(self._sources[storage])

    def _is_tracked(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        return storage in self.kinds and storage not in self._given

    def _is_concerned(self, tensors: Iterable[torch.Tensor], written: torch.Tensor) -> bool:
        return storage_of(written) in self.kinds or any(self._is_tracked(t) for t in tensors)

    def _make(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Any,
        tensors: Iterable[torch.Tensor],
    ) -> None:
        """Note new tensors; views are not new."""
        outputs = _tensors(made)
        held = {storage_of(t) for t in tensors}
        fresh = [t for t in outputs if storage_of(t) not in held]
        self._alive += outputs
        if not fresh:
            return
        for tensor in fresh:
            self.kinds[storage_of(tensor)] = "temporary"
            self.born.add(storage_of(tensor))
        refs = tuple(self._ref(t) if storage_of(t) not in held else None for t in outputs)
        self._note(func, args, kwargs, None, refs)

    def _write(
        self,
        func: torch._ops.OpOverload,
        written: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Note a write. It is not executed, but what executing it would check is checked."""
        self._refuse_values(func, args)
        storage = storage_of(written)
        kind = self.kinds.get(storage)
        if kind == "source":
            self._leave_source(storage)
        elif kind is None:
            self._snapshot(written)
        self._given.discard(storage)
        self._note(func, args, kwargs, self._ref(written), ())
        func(*_on_meta(args), **_without_device(kwargs))
        return written

    def _leave_source(self, storage: int) -> None:
        """A checkpoint tensor that is written to is from now on an intermediate, a copy of it."""
        before = self._ref(self._sources[storage])
        self.kinds[storage] = "temporary"
        after = self._ref(self._sources[storage])
        self.notes.append(Note(torch.ops.aten.clone.default, (before,), {}, None, (after,)))

    def _snapshot(self, written: torch.Tensor) -> None:
        """Keep what a loader's own buffer holds when the first checkpoint element enters it."""
        whole = torch.empty(0, dtype=written.dtype).set_(written.untyped_storage())
        before = self._ref(whole)
        self.kinds[storage_of(written)] = "foreign"
        self.notes.append(
            Note(torch.ops.aten.clone.default, (before,), {}, None, (self._ref(whole),))
        )

    def _note(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Ref | None,
        made: tuple[Ref | None, ...],
    ) -> None:
        def reference(leaf: object) -> object:
            return self._ref(leaf) if isinstance(leaf, torch.Tensor) else leaf

        self.notes.append(
            Note(func, tree_map(reference, args), tree_map(reference, kwargs), written, made)
        )

    def _ref(self, tensor: torch.Tensor) -> Ref:
        storage = storage_of(tensor)
        tracked = self._is_tracked(tensor)
        kind = self.kinds[storage] if tracked else "constant"
        self._alive.append(tensor)
        view = StridedView(
            int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
        )
        # A copy: the loader may go on to change it.
        held = None if tracked else tensor.detach().clone()
        return Ref(kind, storage, view, tensor.dtype, held)

    def _refuse_values(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
        """Control flow may follow shapes, not the values of weights, which are not there."""
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        if not tags.intersection(func.tags):
            return
        at = INDEX_ARGUMENTS.get(name_of(func))
        asked = args if at is None else args[at]
        if any(self._is_tracked(t) for t in _tensors(asked)):
            raise RecordingError(f"the loader decides by the values of weights ({func})")


def name_of(func: torch._ops.OpOverload) -> str:
    """`copy_`, `clone`, ... without namespace and overload."""
    return str(func._schema.name.removeprefix("aten::"))


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _written(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """The tensor that `func` writes in place, if any."""
    written: list[torch.Tensor] = []
    several = False
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            written += _tensors(value)
            several |= len(written) > 1 or not isinstance(value, torch.Tensor | None)
    if several:
        raise RecordingError(f"{func} writes several tensors at once, which is not followed")
    return written[0] if written else None


def _change_shape(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`unsqueeze_` and its like change the tensor object alone."""
    if name_of(func).startswith(("resize", "set_")):
        raise RecordingError(f"the loader gives a tensor other storage ({func})")
    return func(*args, **kwargs)


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


def _run(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on meta if any operand is: only shapes matter."""
    if not any(t.is_meta for t in _tensors((args, kwargs))):
        return func(*args, **kwargs)
    at = INDEX_ARGUMENTS.get(name_of(func))
    if at is None:
        return func(*_on_meta(args), **kwargs)
    # Positions are real: masks among them decide the shape.
    moved = _on_meta(args)
    return func(*moved[:at], args[at], *moved[at + 1 :], **kwargs)


def _on_meta(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return _map_tensors(
        args,
        lambda t: (
            t
            if t.is_meta
            else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        ),
    )


def _map_tensors(
    args: tuple[Any, ...], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Any, ...]:
    mapped: tuple[Any, ...] = tree_map(
        lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, args
    )
    return mapped


def _without_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "device"}
