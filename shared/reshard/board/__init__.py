"""The control board: an authenticated, encrypted blackboard for one run (ZeroMQ, CURVE)."""

from reshard.board.deadline import Deadline
from reshard.board.invitation import Invitation

__all__ = ["Deadline", "Invitation"]
