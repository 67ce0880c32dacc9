"""What a recording comes to: landings, constants, programs, and the buffers that they read."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from reshard.ids import FQN
from reshard.layout.pieces import Piece
from reshard_vllm.recording.tape import Note


def stage_key(slot: str, number: int) -> str:
    """Name of the storage of a slot's buffer."""
    return f"{slot}#{number}"


def slot_of(storage: str) -> str:
    """The slot whose storage, or one of whose buffers, is called `storage`."""
    return storage.rpartition("#")[0] or storage


@dataclass(frozen=True, slots=True)
class Landing:
    """Elements of one checkpoint tensor, and where they go.

    Attributes:
        name: canonical name.
        piece: region of the checkpoint tensor, and its view of the storage that gets it.
        dtype: of that storage: the elements are cast to it.
    """

    name: FQN
    piece: Piece
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Stage:
    """A buffer for checkpoint elements that a computation reads.

    Attributes:
        key: its storage key.
        shape: in elements; contiguous.
        dtype: the checkpoint tensor's.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Excess:
    """Checkpoint elements that travel because a computation mixes them with those that are kept.

    Attributes:
        names: of the checkpoint tensors.
        operations: that mix.
        nbytes: more than the parameter's own elements, in the checkpoint's dtype.
    """

    names: tuple[FQN, ...]
    operations: tuple[str, ...]
    nbytes: int


@dataclass(slots=True)
class Landings:
    """What one loader does on one rank.

    Attributes:
        landings: pure movement (and one cast); no place is reached twice.
        constants: notes that write constants (padding), by parameter, to run before the movement.
        programs: notes to run after the movement, by parameter, in order.
        stages: buffers that the programs read.
        excess: by parameter, what its program reads beyond the elements that it keeps.
        refused: reason by parameter, of writes that cannot be followed.
    """

    landings: list[Landing] = field(default_factory=list)
    constants: dict[str, list[Note]] = field(default_factory=lambda: defaultdict(list))
    programs: dict[str, list[Note]] = field(default_factory=lambda: defaultdict(list))
    stages: list[Stage] = field(default_factory=list)
    excess: dict[str, Excess] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
