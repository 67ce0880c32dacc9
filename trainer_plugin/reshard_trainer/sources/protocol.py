"""What a weight source is: the one thing that a trainer of an unknown kind has to write.

`ModuleSource` is the source of `torch.nn.Module`s; `attach(..., source=...)` takes any other.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from reshard.board import Deadline
from reshard.ids import FQN
from reshard.layout.holding import TensorLayout
from reshard.layout.region import Region
from reshard.layout.table import PieceTable
from reshard_trainer.ensemble import Ensemble


class WeightSource(Protocol):
    """What one trainer rank publishes. Each rank has its own, of its own part.

    Before each publish `refresh` is called on all ranks, then, if it went well on all of them,
    `prepare`; after that the weights are read through `table` and `storage`, and must not change
    until the publish has returned.
    """

    @property
    def device(self) -> torch.device:
        """Where all its storages lie."""

    @property
    def table(self) -> PieceTable:
        """Where each held region lies; views are in elements of `storage(piece.storage)`."""

    @property
    def moves(self) -> int:
        """How often storages have moved: views made before the last time are of no use."""

    @property
    def unused(self) -> tuple[str, ...]:
        """What was asked for and fits no tensor of this rank; an error if it fits none of any."""

    @property
    def prepares(self) -> bool:
        """Whether `prepare` has anything to do; where no rank's has, it is not called."""

    def layout(self) -> tuple[TensorLayout, ...]:
        """What this rank holds, sorted by name; a tensor of which it holds nothing, too.

        The same object as long as nothing has changed.
        """

    def storage(self, key: str) -> torch.Tensor:
        """The flat 1-d view of one storage, without gradients."""

    def refresh(self) -> None:
        """Look at the weights again, before a publish; layout and storages may have changed.

        Nothing here may wait for another rank.

        Raises:
            LayoutError: weights that cannot be published; lists them all.
        """

    def prepare(self, deadline: Deadline) -> None:
        """Bring values up to date that are not simply the trainer's own, such as merged adapters.

        The one place where a source may use the trainer's process groups: all ranks are in it.

        Raises:
            ReshardError: they cannot be had.
        """


def views(source: WeightSource, name: FQN, region: Region) -> list[tuple[Region, torch.Tensor]]:
    """The local views that hold a region of a tensor, without gradients; none where none is held.

    Args:
        source: this rank's weights.
        name: canonical name.
        region: global region, in elements.
    """
    return [
        (
            piece.region,
            source.storage(piece.storage).as_strided(
                piece.view.shape, piece.view.stride, piece.view.offset
            ),
        )
        for piece in source.table.cut(name, region)
    ]


MakeSource = Callable[[Ensemble], WeightSource]
"""Makes one rank's source; called once on each rank, in `attach`."""
