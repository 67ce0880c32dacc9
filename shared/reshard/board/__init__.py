"""The control board: an authenticated, encrypted blackboard that trainer rank 0 serves.

All coordination between the ranks of a refit is a value put under a key and a wait for a key, each
with a deadline. ZeroMQ's CURVE admits only holders of the run's key pair and encrypts the traffic.
"""

from reshard.board.client import BoardClient
from reshard.board.deadline import Deadline
from reshard.board.invitation import Invitation
from reshard.board.server import BoardServer

__all__ = ["BoardClient", "BoardServer", "Deadline", "Invitation"]
