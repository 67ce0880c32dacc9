"""Plans: who sends which region to whom, with a certificate. Pure."""

from reshard.plan.buckets import Bucket, split_into_buckets
from reshard.plan.build import make_plan
from reshard.plan.model import Bounds, Move, RankPlan, TransferOp, TransferPlan

__all__ = [
    "Bounds",
    "Bucket",
    "Move",
    "RankPlan",
    "TransferOp",
    "TransferPlan",
    "make_plan",
    "split_into_buckets",
]
