"""In which order a rank makes its transfers.

All ranks follow one total order of all transfers, each restricted to its own. Then the earliest
unfinished transfer is under way on both of its ends however few a rank has under way at a time, so
bounded buffers cannot deadlock.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reshard.plan import Bucket, RankPlan, split_into_buckets


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message.

    Attributes:
        number: of the bucket within its pair of ranks.
        source: group rank of the sender.
        destination: group rank of the receiver.
        shift: destination minus source, modulo the number of ranks.
        bucket: what it holds.
    """

    number: int
    source: int
    destination: int
    shift: int
    bucket: Bucket

    @property
    def order(self) -> tuple[int, int, int]:
        """Position in the total order: one bucket of every pair in turn, pairs without contention.

        Transfers of one shift have distinct senders and distinct receivers.
        """
        return (self.number, self.shift, self.source)

    @property
    def tensors(self) -> str:
        """What it holds, for messages."""
        first, *more = self.bucket.moves
        return f"{first.name} and {len(more)} more" if more else str(first.name)

    def round(self, width: int) -> tuple[int, int]:
        """Which round it belongs to, if a round takes `width` shifts; the same on both ends."""
        return (self.number, self.shift // width)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's transfers.

    Attributes:
        sends: in order.
        receives: in order.
        fingerprints: by peer: a hash of the messages to and from it; both ends have the same.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    fingerprints: Mapping[int, str]


def make_schedule(plan: RankPlan, size: int, bucket_bytes: int) -> Schedule:
    """Cut a rank's moves into messages and order them."""
    rank = int(plan.rank)
    sends: list[Transfer] = []
    receives: list[Transfer] = []
    for peer, moves in plan.sends.items():
        sends += _transfers(rank, int(peer), size, split_into_buckets(moves, bucket_bytes))
    for peer, moves in plan.receives.items():
        receives += _transfers(int(peer), rank, size, split_into_buckets(moves, bucket_bytes))
    return Schedule(
        sends=tuple(sorted(sends, key=lambda transfer: transfer.order)),
        receives=tuple(sorted(receives, key=lambda transfer: transfer.order)),
        fingerprints=_fingerprints(rank, [*sends, *receives]),
    )


def _transfers(
    source: int, destination: int, size: int, buckets: Iterable[Bucket]
) -> list[Transfer]:
    shift = (destination - source) % size
    return [Transfer(k, source, destination, shift, bucket) for k, bucket in enumerate(buckets)]


def _fingerprints(rank: int, transfers: Iterable[Transfer]) -> dict[int, str]:
    hashes: dict[int, hashlib._Hash] = {}
    for each in sorted(transfers, key=lambda t: (t.source, t.destination, t.number)):
        peer = each.destination if each.source == rank else each.source
        digest = hashes.setdefault(peer, hashlib.sha256())
        digest.update(f"{each.source}>{each.destination}#{each.number}:".encode())
        for move, offset in zip(each.bucket.moves, each.bucket.offsets, strict=True):
            region = (*move.region.offset, *move.region.shape)
            digest.update(f"{move.name}{region}{move.wire_dtype}@{offset};".encode())
        digest.update(f"={each.bucket.nbytes}".encode())
    return {peer: digest.hexdigest() for peer, digest in sorted(hashes.items())}
