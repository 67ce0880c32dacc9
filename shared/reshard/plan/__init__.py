"""Plans: who sends which region to whom, with a certificate. Pure."""

from reshard.plan.buckets import Bucket, split_into_buckets
from reshard.plan.build import make_plan
from reshard.plan.model import Bounds, Transfer, TransferOp, TransferPlan
from reshard.plan.moves import Move, Moves, RankPlan

__all__ = [
    "Bounds",
    "Bucket",
    "Move",
    "Moves",
    "RankPlan",
    "Transfer",
    "TransferOp",
    "TransferPlan",
    "make_plan",
    "split_into_buckets",
]
