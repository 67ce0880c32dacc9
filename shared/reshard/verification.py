"""Verifying a refit without moving weights: both ends digest what went between them.

For each pair of ranks the sender adds up the digests of the regions that it read, in the wire
dtype, and the receiver those of the places where they landed. Equal sums mean that every element
arrived at its own place, with its own bits. Not here: the digest itself (`digest.py`).
"""

from collections.abc import Mapping, Sequence

from reshard.digest import add, digest_region
from reshard.ids import GroupRank
from reshard.layout.boxes import missing
from reshard.layout.region import Region
from reshard.plan import Move, split_into_buckets
from reshard.transport.places import Locate, part, torch_dtype

_CHUNK_BYTES = 4 * 2**20
"""Larger moves are digested in parts: a cast of them is made on the way."""

Digests = Mapping[int, int]
"""By peer: the digest of everything between this rank and that one."""


def digest_moves(
    moves_by_peer: Mapping[GroupRank, Sequence[Move]], locate: Locate
) -> dict[int, int]:
    """Digest what a rank sent (or received), by peer.

    Args:
        moves_by_peer: `RankPlan.sends` or `RankPlan.receives`.
        locate: where this rank holds the elements of a move. A place that repeats elements of an
            earlier one (tied weights) must hold the same bits, and is not counted twice.

    Returns:
        a digest by peer.
    """
    return {
        int(peer): add(
            *(
                _digest(move, locate)
                for bucket in split_into_buckets(moves, _CHUNK_BYTES)
                for move in bucket.moves
            )
        )
        for peer, moves in moves_by_peer.items()
    }


def _digest(move: Move, locate: Locate) -> int:
    wire = torch_dtype(move.wire_dtype)
    whole: dict[Region, int] = {}
    total = 0
    for region, view in locate(move):
        values = view.to(wire)
        if region in whole:
            # A second place of the same elements: where it differs, no sender can match this.
            total = add(total, digest_region(move.name, region, values) - whole[region])
            continue
        whole[region] = digest_region(move.name, region, values)
        fresh = missing(region, [r for r in whole if r != region])
        if fresh == (region,):
            total = add(total, whole[region])
        else:
            parts = (digest_region(move.name, r, part(values, region, r)) for r in fresh)
            total = add(total, *parts)
    return total


def mismatches(digests: Mapping[int, Digests], trainer_size: int) -> list[tuple[int, int]]:
    """The pairs (trainer rank, engine rank) of a session that differ, by all ranks' digests."""
    sent = {rank: by_peer for rank, by_peer in digests.items() if rank < trainer_size}
    received = {rank: by_peer for rank, by_peer in digests.items() if rank >= trainer_size}
    return compare(sent, received)


def compare(sent: Mapping[int, Digests], received: Mapping[int, Digests]) -> list[tuple[int, int]]:
    """The pairs (sender, receiver) whose digests differ.

    >>> compare({0: {2: 7, 3: 8}}, {2: {0: 7}, 3: {0: 9}})
    [(0, 3)]
    """
    pairs = {(s, r) for s, by_peer in sent.items() for r in by_peer}
    pairs |= {(s, r) for r, by_peer in received.items() for s in by_peer}
    return sorted((s, r) for s, r in pairs if sent.get(s, {}).get(r) != received.get(r, {}).get(s))
