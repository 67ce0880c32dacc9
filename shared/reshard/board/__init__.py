"""The control board: an authenticated, encrypted blackboard for one run (ZeroMQ, CURVE).

Trainer rank 0 serves it; every rank of trainer and engines reads and writes it.
"""

from reshard.board.blackboard import BoardLimits
from reshard.board.client import BoardClient, Found, Watch
from reshard.board.deadline import Deadline
from reshard.board.invitation import Invitation
from reshard.board.server import BoardServer

__all__ = ["BoardClient", "BoardLimits", "BoardServer", "Deadline", "Found", "Invitation", "Watch"]
