"""Buckets: the moves of one pair of ranks, cut into messages of bounded size.

Both ends cut the same moves by the same rule, so message `k` of a pair means the same on both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reshard.dtypes import itemsize
from reshard.errors import PlanError
from reshard.layout.boxes import flat_boxes
from reshard.plan.moves import Move


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message.

    Attributes:
        moves: packed one after the other; each starts at a multiple of its element's size.
        offsets: where each move starts, in bytes.
        nbytes: size of the message, in bytes.
    """

    moves: tuple[Move, ...]
    offsets: tuple[int, ...]
    nbytes: int


def split_into_buckets(moves: Sequence[Move], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut `moves` into messages of at most `bucket_bytes`; a larger move is split into boxes.

    Raises:
        PlanError: not even one element fits.
    """
    buckets: list[Bucket] = []
    packed: list[Move] = []
    offsets: list[int] = []
    filled = 0
    for move in _fitting(moves, bucket_bytes):
        start = -(-filled // itemsize(move.wire_dtype)) * itemsize(move.wire_dtype)
        if packed and start + move.nbytes > bucket_bytes:
            buckets.append(Bucket(tuple(packed), tuple(offsets), filled))
            packed, offsets, start = [], [], 0
        packed.append(move)
        offsets.append(start)
        filled = start + move.nbytes
    if packed:
        buckets.append(Bucket(tuple(packed), tuple(offsets), filled))
    return tuple(buckets)


def _fitting(moves: Sequence[Move], bucket_bytes: int) -> Iterator[Move]:
    for move in moves:
        if move.nbytes <= bucket_bytes:
            if move.nbytes:
                yield move
            continue
        most = bucket_bytes // itemsize(move.wire_dtype)
        if not most:
            raise PlanError(f"a bucket of {bucket_bytes} bytes holds no {move.wire_dtype}")
        for start in range(0, move.region.volume, most):
            length = min(most, move.region.volume - start)
            for box in flat_boxes(move.region.shape, start, length):
                region = box.translate(move.region.offset)
                yield Move(move.name, region, move.source_dtype, move.wire_dtype)
