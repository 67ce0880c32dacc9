"""Arithmetic that was asked for by name, on a rank's own elements, before the cast for the wire."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard_trainer.sources.held import Held, packed


@dataclass(frozen=True, slots=True)
class Transform:
    """An elementwise function of a tensor.

    Attributes:
        function: sees boxes of this rank's part of the tensor, in `dtype`; returns as many elements
            in the same shape. What it makes of an element must not depend on the others.
        dtype: in which it computes, and in which the result is held; the sender casts from there.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype = torch.float32


def _plus_one(values: torch.Tensor) -> torch.Tensor:
    return values + 1


ADD_ONE = Transform(_plus_one)
"""For a trainer whose norm weights are centred on zero, and an engine that multiplies by them."""


class Transforms:
    """Transforms by pattern, and the results of the last `compute`."""

    def __init__(self, by_pattern: Mapping[str, Transform]) -> None:
        self._by_pattern = dict(by_pattern)
        self._inputs: dict[FQN, tuple[Held, Held, Transform]] = {}

    def applied(self, held: Mapping[FQN, Held]) -> dict[FQN, Held]:
        """The same tensors, those with a transform replaced by buffers that `compute` fills.

        Raises:
            LayoutError: two patterns for one tensor.
        """
        chosen = {name: found for name in held if (found := self._transform_of(name)) is not None}
        inputs = {}
        for name, transform in chosen.items():
            given = held[name]
            known = self._inputs.get(name)
            if known is not None and known[0].form == given.form:
                inputs[name] = (given, known[1], transform)
            else:
                places, count = packed(region for region, _ in given.places.pieces())
                flat = torch.zeros(count, dtype=transform.dtype, device=given.flat.device)
                inputs[name] = (given, Held(given.shape, flat, places), transform)
        self._inputs = inputs
        return {**held, **{name: result for name, (_, result, _) in inputs.items()}}

    @property
    def unused(self) -> tuple[str, ...]:
        """Patterns that fit no tensor of this rank."""
        return tuple(
            pattern
            for pattern in sorted(self._by_pattern)
            if not any(fnmatchcase(name, pattern) for name in self._inputs)
        )

    @property
    def any(self) -> bool:
        """Whether some tensor of this rank has one."""
        return bool(self._inputs)

    def compute(self) -> None:
        """Apply all transforms to the present values.

        Raises:
            LayoutError: a function that returns another shape.
        """
        for name, (given, result, transform) in self._inputs.items():
            for (_, values), (_, target) in zip(given.views(), result.views(), strict=True):
                changed = transform.function(values.to(transform.dtype))
                if changed.shape != target.shape:
                    raise LayoutError(
                        f"the transform of {name} makes {tuple(changed.shape)} of "
                        f"{tuple(target.shape)}; it has to be elementwise"
                    )
                target.copy_(changed)

    def _transform_of(self, name: FQN) -> Transform | None:
        found = [pattern for pattern in self._by_pattern if fnmatchcase(name, pattern)]
        if len(found) > 1:
            raise LayoutError(f"{name} has several transforms: {', '.join(sorted(found))}")
        return self._by_pattern[found[0]] if found else None
