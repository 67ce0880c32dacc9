"""Placements as text: `R`, `S0`, `SS0/2`, `F`. The one home of the notation.

`str(placement)` writes it; `parse_placement` reads it.
"""

import re

from reshard.errors import LayoutError
from reshard.layout.sharding import FlatShard, Placement, Replicate, Shard, StridedShard


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
