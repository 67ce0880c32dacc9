"""What a recording comes to: landings, constants, programs, and the buffers that they read."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from reshard.ids import FQN
from reshard.layout.pieces import Piece
from reshard_vllm.recording.tape import Note


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


@dataclass(slots=True)
class Landings:
    """What one loader does on one rank.

    Attributes:
        landings: pure movement (and one cast); no place is reached twice.
        constants: notes that write constants (padding), by parameter, to run before the movement.
        programs: notes to run after the movement, by parameter, in order.
        stages: buffers that the programs read.
        refused: reason by parameter, of writes that cannot be followed.
    """

    landings: list[Landing] = field(default_factory=list)
    constants: dict[str, list[Note]] = field(default_factory=lambda: defaultdict(list))
    programs: dict[str, list[Note]] = field(default_factory=lambda: defaultdict(list))
    stages: list[Stage] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
