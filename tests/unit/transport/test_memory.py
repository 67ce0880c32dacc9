"""Shared memory in one process: sizes, seals, room, what is left."""

import gc
import mmap
import os
import resource
from pathlib import Path

import msgspec
import pytest
import torch

from reshard.errors import ReshardError
from reshard.ids import FQN
from reshard.layout.region import Region
from reshard.plan import Move
from reshard.transport import memory
from reshard.transport.exhibits import LiveShards, Snapshot, wanted
from reshard.transport.memory import OwnedSegment, open_segment


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_readers_see_what_the_owner_writes() -> None:
    owned = OwnedSegment("reshard-test", 4096)
    owned.memory[:] = 7
    seen = open_segment(owned.segment, "rank 0")
    assert seen.tolist() == [7] * 4096
    owned.memory[5] = 9
    assert seen[5] == 9
    owned.close()
    assert seen[5] == 9


def test_memory_and_descriptors_go_with_their_users() -> None:
    before = open_files()
    owned = OwnedSegment("reshard-test", 2**20)
    seen = open_segment(owned.segment, "rank 0")
    part = seen[100:200]
    assert open_files() == before + 1
    assert Path("/proc/self/maps").read_text().count("reshard-test") == 2
    del owned, seen
    gc.collect()
    assert open_files() == before
    assert part.sum() == 0
    assert Path("/proc/self/maps").read_text().count("reshard-test") == 1
    del part
    gc.collect()
    assert "reshard-test" not in Path("/proc/self/maps").read_text()


def test_nobody_can_shorten_it_under_a_reader() -> None:
    owned = OwnedSegment("reshard-test", 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(owned.segment.descriptor, 10)
    with pytest.raises(PermissionError):
        os.ftruncate(owned.segment.descriptor, 10_000)
    owned.close()


def test_a_reader_maps_it_read_only() -> None:
    owned = OwnedSegment("reshard-test", 4096)
    seen = open_segment(owned.segment, "rank 0")
    line = next(
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.startswith(f"{seen.data_ptr():x}-")
    )
    assert line.split()[1] == "r--s"
    owned.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"nbytes": 8192}, r"has 4096 bytes .*expected 8192"),
        ({"inode": 1}, "is not what it announced"),
        ({"descriptor": 10**6}, "the shared memory of rank 3 is gone"),
        ({"pid": 2**22 + 1}, "the shared memory of rank 3 is gone"),
    ],
)
def test_another_file_is_noticed(change: dict[str, int], text: str) -> None:
    owned = OwnedSegment("reshard-test", 4096)
    with pytest.raises(ReshardError, match=text):
        open_segment(msgspec.structs.replace(owned.segment, **change), "rank 3")
    owned.close()


def test_no_room_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    with pytest.raises(ReshardError, match=r"no room for \d+ bytes of shared memory .*No space"):
        OwnedSegment("reshard-test", 2**50)

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ReshardError, match="share the live shards instead"):
        OwnedSegment("reshard-test", 4096)
    assert open_files() == before


def test_a_mapping_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    owned = OwnedSegment("reshard-test", 4096)
    monkeypatch.setattr(mmap, "MAP_SHARED", 0)
    with pytest.raises(ReshardError, match=r"cannot be mapped: .*Invalid argument"):
        open_segment(owned.segment, "rank 3")
    owned.close()


def halves(name: str, *regions: Region) -> list[Move]:
    return [Move(FQN(name), region, "float32", "bfloat16") for region in regions]


def test_what_several_readers_want_is_held_once() -> None:
    moves = halves("t", Region((0, 0), (4, 8)), Region((2, 0), (4, 8)), Region((0, 0), (4, 8)))
    assert [m.region for m in wanted(moves)] == [Region((0, 0), (6, 8))]


def test_a_snapshot_is_cast_once_and_changes_when_refreshed() -> None:
    weights = torch.arange(24, dtype=torch.float32).view(4, 6) / 7
    (move,) = halves("t", Region((0, 0), (4, 6)))
    snapshot = Snapshot([move], lambda m: [(m.region, weights)])
    (shown,) = snapshot.tensors
    (placed,) = shown.places
    seen = open_segment(snapshot.segments[0], "rank 0").view(torch.bfloat16)
    view = seen.as_strided(placed.view.shape, placed.view.stride, placed.view.offset)
    snapshot.refresh()
    assert torch.equal(view, weights.to(torch.bfloat16))
    weights += 1
    assert not torch.equal(view, weights.to(torch.bfloat16))
    snapshot.refresh()
    assert torch.equal(view, weights.to(torch.bfloat16))
    assert snapshot.extra_bytes == 48
    snapshot.close()


def test_live_shards_move_the_storage_under_the_optimizer() -> None:
    """The parameter, its optimizer and other views of the storage go on with the moved memory."""
    model = torch.nn.Linear(6, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    alias = model.weight.detach().view(-1)
    (move,) = halves("w", Region((0, 0), (4, 6)))
    live = LiveShards([move], lambda m: [(m.region, model.weight)])
    seen = open_segment(live.segments[0], "rank 0").view(torch.float32).view(4, 6)
    before = seen.clone()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert not torch.equal(seen, before)
    assert torch.equal(seen, model.weight.detach())
    assert torch.equal(alias.view(4, 6), seen)
    assert live.extra_bytes == 0


def test_live_shards_share_a_storage_once() -> None:
    flat = torch.zeros(24)
    views = {"a": flat[:12].view(3, 4), "b": flat[12:].view(3, 4)}
    moves = halves("a", Region((0, 0), (3, 4))) + halves("b", Region((0, 0), (3, 4)))
    live = LiveShards(moves, lambda m: [(m.region, views[m.name])])
    assert len(live.segments) == 1
    offsets = {shown.name: shown.places[0].view.offset for shown in live.tensors}
    assert offsets == {"a": 0, "b": 12}


def test_too_few_descriptors_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 10))
    (move,) = halves("t", Region((0,), (4,)))
    with pytest.raises(ReshardError, match=r"the limit is 10: raise `ulimit -n`"):
        LiveShards([move], lambda m: [(m.region, torch.zeros(4))])


def test_a_full_dev_shm_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 0, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full())
    (move,) = halves("t", Region((0,), (4,)))
    with pytest.raises(ReshardError, match=r"need 16 bytes in /dev/shm, 0 are free"):
        LiveShards([move], lambda m: [(m.region, torch.zeros(4))])


def test_available_memory_is_that_of_the_machine() -> None:
    assert 0 < memory.available_bytes() < 2**50
