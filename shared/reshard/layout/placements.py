"""Placements: what one mesh axis does to a tensor. The one home of their notation.

`str(placement)` writes it, `parse_placement` reads it: `R`, `S0`, `SS0/2`, `F`.
"""

import re
from dataclasses import dataclass

from reshard.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the same elements."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts `dim` by the rule of `torch.chunk`: 10 rows over 4 ranks give 3, 3, 3, 1."""

    dim: int

    def __str__(self) -> str:
        return f"S{self.dim}"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The axis cuts each of `split_factor` earlier-made parts of `dim` again (FSDP over TP).

    FSDP2 shards after tensor parallelism, but its mesh axis stands to the left: reading the axes
    left to right, FSDP's cut has to leave room for the `split_factor` cuts still to come.
    """

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"SS{self.dim}/{self.split_factor}"


@dataclass(frozen=True, slots=True)
class FlatShard:
    """The axis cuts the flattened tensor into ceil-divided contiguous intervals (FSDP1, ZeRO)."""

    def __str__(self) -> str:
        return "F"


Placement = Replicate | Shard | StridedShard | FlatShard


def parse_placement(text: str) -> Placement:
    """The placement that `text` stands for.

    >>> parse_placement("SS0/2")
    StridedShard(dim=0, split_factor=2)

    Raises:
        LayoutError: a partial sum, or no placement.
    """
    if re.fullmatch(r"_?P(artial)?(\W.*)?", text, flags=re.IGNORECASE):
        raise LayoutError(
            f"placement {text!r}: each rank holds a partial sum, not elements of the tensor; "
            "redistribute it to a shard or a replica first"
        )
    if text == "R":
        return Replicate()
    if text == "F":
        return FlatShard()
    if match := re.fullmatch(r"S(\d{1,9})", text, flags=re.ASCII):
        return Shard(int(match[1]))
    if match := re.fullmatch(r"SS(\d{1,9})/(\d{1,9})", text, flags=re.ASCII):
        return StridedShard(int(match[1]), int(match[2]))
    raise LayoutError(
        f"unknown placement {text!r}; expected R, S<dim>, SS<dim>/<split_factor> or F"
    )
