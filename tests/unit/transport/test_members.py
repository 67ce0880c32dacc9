"""Ranks introduce themselves before any group is made; what cannot form one is refused by name."""

import pytest

from reshard.errors import PeerError
from reshard.transport.group import Member, _check_members
from reshard.transport.neighbours import Residence

GPU = "cuda:GPU-5e1b"
HERE = Residence.own()


def faults(*members: Member) -> tuple[str, ...]:
    with pytest.raises(PeerError) as caught:
        _check_members(dict(enumerate(members)), 1)
    return caught.value.faults


def test_ranks_of_one_kind_form_a_group() -> None:
    _check_members(
        {0: Member(2, "cpu", "2.13.0+cpu", HERE), 1: Member(2, "cpu", "2.13.0", HERE)}, 1
    )
    _check_members(
        {0: Member(2, GPU, "2.13.0", HERE), 1: Member(2, "cuda:GPU-77", "2.13.0", HERE)}, 1
    )


def test_two_ranks_on_one_gpu_are_named() -> None:
    member = Member(2, GPU, "2.13.0", HERE)
    assert faults(member, member) == (
        f"rank 1 (engine rank 0) and rank 0 (trainer rank 0) share GPU {GPU}: NCCL takes one rank "
        "each",
    )


def test_all_that_does_not_fit_is_told_at_once() -> None:
    assert faults(Member(3, GPU, "2.13.0", HERE), Member(2, "cpu", "2.9.1", HERE)) == (
        "rank 0 (trainer rank 0) counts 3 ranks; 2 are expected",
        f"rank 1 (engine rank 0) sends from cpu, rank 0 (trainer rank 0) from {GPU}: one group is "
        "all gloo or all NCCL",
        "rank 1 (engine rank 0) runs torch 2.9.1; others 2.13.0",
    )
