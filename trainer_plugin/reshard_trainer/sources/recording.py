"""Running a state-dict adapter without values, to learn which element goes where.

The adapter gets meta tensors of the trainer's global shapes. A `TorchDispatchMode` sees every
operation: views need no note, for a view's storage, offset and strides say it all; what makes a
new tensor by moving elements (cat, stack, clone, indexing, copying into an empty one) is noted as
boxes; what computes is remembered with its reason, and refused where its result is returned.
Coordinate space: global, in both the trainer's tensors and the adapter's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from reshard.errors import LayoutError
from reshard.layout.align import Correspondence, align, align_elements
from reshard.layout.boxes import BoxIndex, subtract
from reshard.layout.pieces import Piece
from reshard.layout.region import Region
from reshard.layout.view import StridedView

StateDict = dict[str, torch.Tensor]
Adapter = Callable[[StateDict], Mapping[str, torch.Tensor]]
"""From tensors under the trainer's (global) names to tensors under canonical names."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """One tensor that an adapter returned.

    Attributes:
        shape: of the whole tensor, in elements.
        dtype: of it, and of all that it is made of.
        origins: which of its elements are which of the trainer's, by the trainer's name; together
            all of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    origins: tuple[tuple[str, Correspondence], ...]


def record(
    adapter: Adapter, given: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Adapted]:
    """What `adapter` makes of tensors of these shapes and dtypes, by canonical name.

    Raises:
        LayoutError: it computes, asks for values, or returns elements that it was not given; lists
            every such tensor, with the operation and what went into it.
    """
    state = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in given.items()
    }
    recorder = _Recorder(state)
    try:
        with recorder, torch.no_grad():
            returned = dict(adapter(dict(state)))
    except Exception as error:
        raise LayoutError(
            f"the adapter failed on tensors without values: {type(error).__name__}: {error}"
        ) from error
    adapted: dict[str, Adapted] = {}
    faults = []
    for name, tensor in returned.items():
        try:
            adapted[name] = recorder.followed(tensor)
        except LayoutError as error:
            faults.append(f"{name}: {error}")
    if faults:
        raise LayoutError("what the adapter returns is not made of the trainer's elements", faults)
    return adapted


_COPIES: Final = frozenset(
    {"clone", "_to_copy", "_unsafe_view", "_reshape_copy", "lift_fresh_copy"}
)
_BY_NUMBERS: Final = frozenset(
    {"index_select", "index", "flip", "roll", "repeat", "gather", "take", "take_along_dim", "rot90"}
)
_EMPTY: Final = frozenset({"empty_like", "new_empty", "empty_strided", "new_empty_strided"})


@dataclass(slots=True)
class _Made:
    """A tensor that an operation made; contiguous.

    Attributes:
        shape: of it, in elements.
        content: boxes of it; each piece's storage is a trainer's name, its view one of that tensor.
        reason: why its elements are not the trainer's; empty if they are.
    """

    shape: tuple[int, ...]
    content: list[Piece] = field(default_factory=list)
    reason: str = ""
    _lookup: BoxIndex | None = None

    def meeting(self, region: Region) -> Iterator[tuple[Piece, Region]]:
        """What is held of `region`."""
        if self._lookup is None:
            self._lookup = BoxIndex([piece.region for piece in self.content])
        for i, common in self._lookup.meeting(region):
            yield self.content[i], common

    def write(self, piece: Piece) -> None:
        """Put a box in; the last one counts."""
        kept = []
        for old in self.content:
            if old.region.intersect(piece.region) is None:
                kept.append(old)
            else:
                kept += [old.narrow(rest) for rest in subtract(old.region, piece.region)]
        self.content = [*kept, piece]
        self._lookup = None


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = {_storage(tensor): (name, tensor) for name, tensor in state.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in state.items()}
        self._made: dict[int, _Made] = {}
        # Identities are only unique among living storages.
        self._alive: list[torch.Tensor] = list(state.values())

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        inputs = _tensors((args, kwargs))
        name = func._schema.name.removeprefix("aten::")
        if not any(self._is_known(tensor) for tensor in inputs):
            return self._blank(func(*args, **kwargs))
        if func._schema.is_mutable:
            return self._written(func, name, args, kwargs)
        outputs = self._outputs(func, name, args, kwargs)
        held = {_storage(tensor): tensor for tensor in inputs if self._is_known(tensor)}
        return tree_map(
            lambda leaf: (
                self._one(func, name, args, leaf, held) if isinstance(leaf, torch.Tensor) else leaf
            ),
            outputs,
        )

    def followed(self, tensor: object) -> Adapted:
        """Where each element of a returned tensor comes from.

        Raises:
            LayoutError: some come from no tensor of the trainer.
        """
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"a {type(tensor).__name__}, not a tensor")
        shape = tuple(tensor.shape)
        pairs = self._resolved(tensor)
        known = sum(prod(view.shape) for view, _, _ in pairs)
        if known != prod(shape):
            raise LayoutError(f"{prod(shape) - known} of its elements are not the trainer's")
        dtypes = {self._dtypes[name] for _, name, _ in pairs} - {tensor.dtype}
        if dtypes:
            raise LayoutError(
                f"cast from {', '.join(map(str, dtypes))} to {tensor.dtype}; leave casts out, the "
                "sender casts to what the engine wants"
            )
        origins = tuple((name, Correspondence(stored, view)) for view, name, stored in pairs)
        return Adapted(shape, tensor.dtype, origins)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        storage = _storage(tensor)
        made = self._made.get(storage)
        return storage in self._sources or (made is not None and bool(made.content or made.reason))

    def _blank(self, outputs: Any) -> Any:
        """Tensors of the adapter's own, into which elements may be copied later."""
        for tensor in _tensors(outputs):
            self._alive.append(tensor)
            if tensor.is_contiguous() and not tensor.storage_offset():
                self._made.setdefault(_storage(tensor), _Made(tuple(tensor.shape)))
        return outputs

    def _outputs(
        self,
        func: torch._ops.OpOverload,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run on meta: only shapes matter. Positions stay real: masks among them decide a shape."""
        kwargs = {
            key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")
        }
        if any(tensor.is_meta for tensor in _tensors(args)):
            kept = 1 if name in _BY_NUMBERS else len(args)
            args = (*_on_meta(args[:kept]), *args[kept:])
        outputs = func(*args, **kwargs)
        self._alive += _tensors(outputs)
        return outputs

    def _one(
        self,
        func: torch._ops.OpOverload,
        name: str,
        args: tuple[Any, ...],
        output: torch.Tensor,
        held: Mapping[int, torch.Tensor],
    ) -> torch.Tensor:
        same = held.get(_storage(output))
        if same is not None and same.dtype == output.dtype and name != "as_strided":
            return output
        fresh = torch.empty(output.shape, dtype=output.dtype, device="meta")
        self._alive.append(fresh)
        made = self._made[_storage(fresh)] = _Made(tuple(output.shape))
        try:
            self._fill(made, name, args, output, fresh)
        except LayoutError as error:
            made.content, made.reason = [], str(error)
        if not made.content and not made.reason and name not in _EMPTY:
            into = ", ".join(sorted(self._names(args)))
            made.reason = f"computed by {func} from {into}; an adapter moves elements, and no more"
        return fresh

    def _fill(
        self,
        made: _Made,
        name: str,
        args: tuple[Any, ...],
        output: torch.Tensor,
        fresh: torch.Tensor,
    ) -> None:
        """Note where the elements of a new tensor come from, if the operation moves elements."""
        if name in _COPIES:
            if args[0].dtype != output.dtype:
                raise LayoutError(
                    f"cast from {args[0].dtype} to {output.dtype}; leave casts out, the sender "
                    "casts to what the engine wants"
                )
            self._place(
                made, fresh, args[0].view(output.shape) if name == "_unsafe_view" else args[0]
            )
        elif name in ("cat", "stack"):
            self._join(made, name, args, fresh)
        elif name in _BY_NUMBERS:
            self._move(made, args, fresh, name)

    def _join(self, made: _Made, name: str, args: tuple[Any, ...], fresh: torch.Tensor) -> None:
        dim = args[1] if len(args) > 1 else 0
        if len({tensor.dtype for tensor in args[0]}) > 1:
            raise LayoutError(f"{name} of tensors of different dtypes")
        start = 0
        for i, tensor in enumerate(args[0]):
            if name == "stack":
                self._place(made, fresh.select(dim, i), tensor)
            elif tensor.shape != (0,):
                extent = tensor.shape[dim]
                self._place(made, fresh.narrow(dim, start, extent), tensor)
                start += extent

    def _move(self, made: _Made, args: tuple[Any, ...], fresh: torch.Tensor, name: str) -> None:
        """An operation that moves elements as it is told, replayed on their numbers."""
        moved = args[0]
        if any(self._is_known(tensor) for tensor in _tensors(args[1:])):
            raise LayoutError(f"{name} by positions that depend on the values of weights")
        numbers = torch.arange(moved.numel()).reshape(moved.shape)
        overload = getattr(torch.ops.aten, name)
        placed = overload(numbers, *args[1:]).reshape(-1).numpy()
        for region, view in align_elements(
            tuple(moved.shape), placed, StridedView.contiguous(tuple(fresh.shape))
        ):
            box = moved[tuple(map(slice, region.offset, region.end))]
            self._place(made, fresh.as_strided(view.shape, view.stride, view.offset), box)

    def _place(self, made: _Made, target: torch.Tensor, value: torch.Tensor) -> None:
        """Note that a view of a made tensor holds the elements of `value`."""
        shape = tuple(value.shape)
        over = Piece(Region.whole(shape), "", _view(target))
        for view, name, stored in self._resolved(value):
            for part, plain in _unrepeated(view, stored):
                for region, source in align(shape, part, plain):
                    there = over.narrow(region).view
                    for box, origin in align(made.shape, there, source):
                        made.write(Piece(box, name, origin))

    def _resolved(self, tensor: torch.Tensor) -> list[tuple[StridedView, str, StridedView]]:
        """Parts of a tensor, each with the trainer's tensor and the view of it that it is.

        Raises:
            LayoutError: elements that were computed.
        """
        shape = tuple(tensor.shape)
        if not prod(shape):
            return []
        source = self._sources.get(_storage(tensor))
        if source is not None:
            return [(StridedView.contiguous(shape), source[0], _view(tensor))]
        made = self._made.get(_storage(tensor))
        if made is None:
            return []
        if made.reason:
            raise LayoutError(made.reason)
        parts = []
        whole = StridedView.contiguous(shape)
        for part, plain in _unrepeated(whole, _view(tensor)):
            for box, view in align(made.shape, plain, part):
                there = Piece(box, "", view)
                for piece, common in made.meeting(box):
                    stored = piece.narrow(common).view
                    parts.append((there.narrow(common).view, piece.storage, stored))
        return parts

    def _written(
        self,
        func: torch._ops.OpOverload,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """An operation in place: copying into an empty tensor moves elements, all else computes."""
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if torch.Tag.inplace_view in func.tags and target is not None:
            return func(*args, **kwargs)
        if target is None:
            raise LayoutError(f"{func} writes into tensors, which an adapter does not do")
        source = self._sources.get(_storage(target))
        if source is not None:
            raise LayoutError(f"{func} writes into {source[0]}, a weight of the trainer")
        made = self._made.get(_storage(target))
        if made is None:
            raise LayoutError(f"{func} writes into a tensor of unknown make")
        if made.reason:
            return target
        if name != "copy_" or args[1].dtype != target.dtype:
            made.reason = f"computed by {func} from {', '.join(sorted(self._names(args)))}"
            return target
        try:
            self._place(made, target, args[1].expand(target.shape))
        except LayoutError as error:
            made.content, made.reason = [], str(error)
        return target

    def _names(self, args: tuple[Any, ...]) -> set[str]:
        """The trainer's tensors that go into an operation."""
        found = set()
        for tensor in _tensors(args):
            storage = _storage(tensor)
            if storage in self._sources:
                found.add(self._sources[storage][0])
            elif storage in self._made:
                found |= {piece.storage for piece in self._made[storage].content}
        return found


def _unrepeated(
    one: StridedView, repeated: StridedView
) -> Iterator[tuple[StridedView, StridedView]]:
    """Both views, cut until the second one shows no element twice by a stride of zero."""
    for dim, (extent, step) in enumerate(zip(repeated.shape, repeated.stride, strict=True)):
        if extent > 1 and step == 0:
            for at in range(extent):
                yield from _unrepeated(_at(one, dim, at), _at(repeated, dim, at))
            return
    yield one, repeated


def _at(view: StridedView, dim: int, at: int) -> StridedView:
    shape = (*view.shape[:dim], 1, *view.shape[dim + 1 :])
    return StridedView(view.offset + at * view.stride[dim], shape, view.stride)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view(tensor: torch.Tensor) -> StridedView:
    return StridedView(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _on_meta(args: tuple[Any, ...]) -> tuple[Any, ...]:
    moved: tuple[Any, ...] = tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, args
    )
    return moved
