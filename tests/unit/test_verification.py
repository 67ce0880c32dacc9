"""Digests of both ends of a pair: equal after a true transfer, different after any other."""

import torch

from reshard.ids import FQN, GroupRank
from reshard.layout.region import Region
from reshard.plan import Move
from reshard.transport.places import Places
from reshard.verification import compare, digest_moves

W = FQN("w")
WHOLE = torch.arange(64, dtype=torch.float32).view(8, 8)
MOVES = {GroupRank(5): [Move(W, Region((0, 0), (8, 4)), "float32", "bfloat16")]}


def box(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(map(slice, region.offset, region.end))]


def sender(move: Move) -> Places:
    return [(move.region, box(WHOLE, move.region))]


def test_a_cast_and_other_boxes_make_no_difference() -> None:
    landed = WHOLE.to(torch.bfloat16)

    def receiver(move: Move) -> Places:
        halves = (Region((0, 0), (3, 4)), Region((3, 0), (5, 4)))
        return [(half, box(landed, half)) for half in halves]

    assert digest_moves(MOVES, sender) == digest_moves(MOVES, receiver)


def test_a_wider_place_is_compared_in_the_wire_dtype() -> None:
    landed = WHOLE.to(torch.bfloat16).to(torch.float32)
    assert digest_moves(MOVES, sender) == digest_moves(
        MOVES, lambda move: [(move.region, box(landed, move.region))]
    )


def test_second_places_must_agree_and_do_not_count_twice() -> None:
    landed = WHOLE.to(torch.bfloat16)
    tied = landed.clone()
    region = Region((0, 0), (8, 4))
    overlapping = Region((2, 0), (4, 4))

    def receiver(move: Move) -> Places:
        return [
            (region, box(landed, region)),
            (region, box(tied, region)),
            (overlapping, box(landed, overlapping)),
        ]

    assert digest_moves(MOVES, sender) == digest_moves(MOVES, receiver)
    tied[3, 2] += 1
    assert digest_moves(MOVES, sender) != digest_moves(MOVES, receiver)


def test_a_wrong_element_names_its_pair() -> None:
    landed = WHOLE.to(torch.bfloat16)
    landed[1, 1] = 77
    received = digest_moves(MOVES, lambda move: [(move.region, box(landed, move.region))])
    assert compare({0: digest_moves(MOVES, sender)}, {5: {0: received[5]}}) == [(0, 5)]


def test_a_pair_that_only_one_end_knows_differs() -> None:
    assert compare({0: {1: 4}}, {}) == [(0, 1)]
    assert compare({}, {1: {0: 4}}) == [(0, 1)]
