"""Handlers: packed weights that live behind a pointer, held by a function or a helper object.

A post-load step that runs again makes new handlers. Compiled graphs hold the old ones (vLLM drops
their guards), so the old objects stay where they are and take over the new contents; the new
objects leave with the old contents and release them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Final, Protocol, TypeGuard

import torch

_DEPTH: Final = 3


class Handler(Protocol):
    """vLLM's handle on a packed weight: a pointer, kept in a tensor."""

    handler_tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Held:
    """An attribute that holds a packed weight.

    Attributes:
        owner: the object that has the attribute.
        name: of the attribute.
        value: a handler, or a function that closes over handlers or packed tensors.
    """

    owner: object
    name: str
    value: object


def held_by(module: torch.nn.Module) -> list[Held]:
    """All packed weights behind the attributes of a module and of its helper objects."""
    return list(_held(module, set(), _DEPTH))


def keep(held: list[Held]) -> None:
    """Put the new contents into the objects that were there before, and those back in place."""
    for before in held:
        fresh = before.owner.__dict__.get(before.name)
        if fresh is not before.value and _fits(before.value, fresh):
            _take_over(before.value, fresh)
            before.owner.__dict__[before.name] = before.value


def put_back(held: list[Held]) -> None:
    """Give every owner the object that it had, contents and all."""
    for before in held:
        before.owner.__dict__[before.name] = before.value


def _held(owner: object, seen: set[int], depth: int) -> Iterator[Held]:
    seen.add(id(owner))
    for name, value in list(owner.__dict__.items()):
        if _is_handler(value) or (isinstance(value, FunctionType) and value.__closure__):
            yield Held(owner, name, value)
        elif depth and id(value) not in seen and _is_helper(value):
            yield from _held(value, seen, depth - 1)


def _fits(old: object, fresh: object) -> bool:
    """Whether `old` can take over the contents of `fresh`."""
    if _is_handler(old):
        return _is_handler(fresh)
    if isinstance(old, torch.Tensor):
        if not isinstance(fresh, torch.Tensor):
            return False
        return old.shape == fresh.shape and old.dtype == fresh.dtype
    if isinstance(old, FunctionType):
        if not isinstance(fresh, FunctionType) or old.__code__ is not fresh.__code__:
            return False
        return all(_fits(a, b) for a, b in _contents(old, fresh))
    return old is fresh or (isinstance(old, int | float | bool | str) and old == fresh)


def _take_over(old: object, fresh: object) -> None:
    if _is_handler(old) and _is_handler(fresh):
        pointer = old.handler_tensor.clone()
        old.handler_tensor.copy_(fresh.handler_tensor)
        fresh.handler_tensor.copy_(pointer)
    elif isinstance(old, torch.Tensor) and isinstance(fresh, torch.Tensor):
        old.copy_(fresh)
    elif isinstance(old, FunctionType) and isinstance(fresh, FunctionType):
        for a, b in _contents(old, fresh):
            _take_over(a, b)


def _contents(old: FunctionType, fresh: FunctionType) -> list[tuple[object, object]]:
    """What both close over, name by name."""
    cells = zip(old.__closure__ or (), fresh.__closure__ or (), strict=True)
    return [(a.cell_contents, b.cell_contents) for a, b in cells]


def _is_handler(value: object) -> TypeGuard[Handler]:
    return isinstance(getattr(value, "handler_tensor", None), torch.Tensor)


def _is_helper(value: object) -> bool:
    """vLLM's methods, schemes and kernels of a layer; not other layers, nor configurations."""
    ours = type(value).__module__.startswith("vllm.model_executor.")
    return ours and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | type)
