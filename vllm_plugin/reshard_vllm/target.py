"""What the receiver needs of the engine rank it lives in.

Kept apart from vLLM so that the receiver, and every failure of it, can be tested with plain
tensors.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch

from reshard.dtypes import DType
from reshard.ids import FQN, EngineRank
from reshard.layout.holding import TensorLayout
from reshard.layout.region import Region
from reshard.session import ClassBytes, Install, TensorSpec


class Installer(Protocol):
    """Where the canonical tensors land on this rank, and how they become live."""

    @property
    def classes(self) -> ClassBytes:
        """Bytes that this rank receives, by class of destination."""

    @property
    def faults(self) -> Sequence[str]:
        """Why the trainer's tensors cannot be installed, one line each; empty if they can."""

    @property
    def notes(self) -> Sequence[str]:
        """What a refit leaves out or does beyond moving bytes, one line each."""

    @property
    def staging_bytes(self) -> int:
        """Extra memory that a refit takes on this rank, in bytes."""

    def needs(self) -> tuple[TensorLayout, ...]:
        """The regions that this rank must receive, disjoint, each once."""

    def write(
        self, name: FQN, dtype: DType, region: Region
    ) -> Sequence[tuple[Region, torch.Tensor]]:
        """Every local place of a region: boxes of it, each with the view that receives it."""

    def begin(self) -> None:
        """Prepare to receive one version."""

    def commit(self) -> None:
        """Make the received version live, post-load steps included."""

    def abandon(self) -> None:
        """Forget what was received; with `staged`, the old version stays whole."""


class Target(Protocol):
    """One engine rank."""

    @property
    def rank(self) -> EngineRank:
        """This rank within its engine, data-parallel replicas included."""

    @property
    def size(self) -> int:
        """Number of the engine's ranks; of one replica's where it does not know the others."""

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""

    @property
    def model_name(self) -> str:
        """What the engine serves, for messages."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Of the software that both sides must agree on."""

    def state(self) -> tuple[Literal["ready", "asleep"], str]:
        """Whether weights can be received now, and why not."""

    def installer(self, specs: Sequence[TensorSpec], install: Install) -> Installer:
        """The installer for the trainer's tensors.

        Raises:
            ReshardError: the layout cannot be recorded or proven.
        """
