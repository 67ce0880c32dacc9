"""What follows from a bound on memory."""

import pytest

from reshard.ids import GroupRank
from reshard.transport.bounds import IN_FLIGHT, UNBOUNDED, Bound
from reshard.transport.casting import LEAST_ELEMENTS, SCRATCH_BYTES

MIB = 2**20


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("nbytes", [1024, 4 * MIB, 2 * SCRATCH_BYTES, 512 * MIB])
def test_all_buffers_together_stay_within_the_bound(nbytes: int, backend: str) -> None:
    bucket = Bound(nbytes, {}).bucket_bytes(16 * MIB, backend)
    sets = 2 if backend == "nccl" else 1
    scratch = SCRATCH_BYTES if bucket >= LEAST_ELEMENTS else bucket
    assert 8 <= bucket <= 16 * MIB
    assert 2 * IN_FLIGHT * sets * bucket + scratch <= nbytes


def test_without_a_bound_messages_are_as_wanted() -> None:
    assert UNBOUNDED.bucket_bytes(16 * MIB, "gloo") == 16 * MIB
    assert UNBOUNDED.allows_showing(0, "snapshot")


def test_a_snapshot_counts_and_live_shards_do_not() -> None:
    bound = Bound(100 * MIB, {GroupRank(0): 99 * MIB, GroupRank(1): 101 * MIB})
    assert bound.allows_showing(0, "snapshot")
    assert not bound.allows_showing(1, "snapshot")
    assert bound.allows_showing(1, "live")
    assert not Bound(1024, {}).allows_showing(1, "live")
