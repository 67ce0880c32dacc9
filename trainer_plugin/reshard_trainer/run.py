"""What all parts of one trainer rank's publishing share: who it is, the board, the settings."""

from dataclasses import dataclass

from reshard.board import BoardClient, Invitation
from reshard.ids import GroupRank
from reshard_trainer.settings import Settings
from reshard_trainer.sources import WeightSource


@dataclass(frozen=True, slots=True)
class TrainerRun:
    """One trainer rank's place in one run.

    Attributes:
        run_id: unique to this run, also among restarts.
        rank: group rank of this process, equal to its trainer rank.
        size: number of trainer ranks.
        board: the run's control board.
        invitation: what engines need to join it.
        settings: of trainer rank 0.
        source: this rank's weights.
    """

    run_id: str
    rank: GroupRank
    size: int
    board: BoardClient
    invitation: Invitation
    settings: Settings
    source: WeightSource
