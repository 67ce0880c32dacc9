"""The store: exact regions, few bytes, and no half-written or damaged version is ever read."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from reshard.ids import FQN, GroupRank
from reshard.layout.holding import RankLayout, TensorLayout
from reshard.layout.region import Region
from reshard.store import (
    StoreError,
    StoreReader,
    VersionDamaged,
    VersionGone,
    VersionUnsealed,
    retire,
    seal,
    write_shard,
)
from reshard.store.manifest import BLOCK_BYTES, MANIFEST, folder_of, shard_name
from reshard.store.retire import sealed_versions
from reshard.store.runs import byte_runs

W = FQN("w")


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Region]:
    pairs = [
        st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda p: (min(p), max(p)))
        for n in shape
    ]
    return st.tuples(*pairs).map(
        lambda found: Region(tuple(a for a, _ in found), tuple(b - a for a, b in found))
    )


def cut(values: torch.Tensor, region: Region) -> torch.Tensor:
    return values[tuple(slice(o, e) for o, e in zip(region.offset, region.end, strict=True))]


def write(root: Path, values: torch.Tensor, shards: list[list[Region]], version: int = 1) -> None:
    for rank, regions in enumerate(shards):
        tensor = TensorLayout(W, tuple(values.shape), "float32", tuple(regions))
        layout = RankLayout(GroupRank(rank), (tensor,))
        write_shard(root, "run", version, layout, lambda _, region: cut(values, region))


def rows(values: torch.Tensor, count: int) -> list[list[Region]]:
    """Row shards by the rule of torch.chunk, the last ones perhaps empty."""
    step = -(-values.shape[0] // count)
    starts = [min(rank * step, values.shape[0]) for rank in range(count + 1)]
    rest = tuple(values.shape[1:])
    return [
        [Region((a, *(0 for _ in rest)), (b - a, *rest))] if b > a else []
        for a, b in itertools.pairwise(starts)
    ]


def coded(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def stored(root: Path, version: int = 1) -> torch.Tensor:
    values = coded(10, 6) + version
    shards = rows(values, 4)
    write(root, values, shards, version)
    seal(root, "run", version, len(shards))
    return values


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple), st.data())
def test_runs_are_the_elements_of_the_part(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = Region.whole(shape)
    part = data.draw(boxes(shape))
    flat = [i for at, n in byte_runs(box, part, 1) for i in range(at, at + n)]
    assert flat == cut(coded(*shape), part).flatten().to(torch.int64).tolist()


@given(st.data())
def test_any_region_of_any_sharding_is_read_exactly(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("store")
    values = coded(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5)))
    shards = rows(values, data.draw(st.integers(1, 5)))
    write(root, values, shards)
    seal(root, "run", 1, len(shards))
    region = data.draw(boxes(tuple(values.shape)))
    assert torch.equal(StoreReader(root, 1, run_id="run").read(W, region), cut(values, region))


def test_shards_are_plain_safetensors_and_replicas_are_no_fault(tmp_path: Path) -> None:
    values = coded(4, 3)
    whole = Region.whole((4, 3))
    write(tmp_path, values, [[whole], [whole]])
    seal(tmp_path, "run", 1, 2)
    held = load_file(folder_of(tmp_path, 1) / shard_name(1))
    assert torch.equal(held["w#0"], values)
    assert torch.equal(StoreReader(tmp_path, 1).read(W, whole), values)


def test_only_the_blocks_of_the_region_are_read(tmp_path: Path) -> None:
    values = coded(1024, 1024)
    write(tmp_path, values, [[Region.whole((1024, 1024))]])
    seal(tmp_path, "run", 1, 1)
    reader = StoreReader(tmp_path, 1)
    part = Region((100, 0), (16, 1024))
    assert torch.equal(reader.read(W, part), cut(values, part))
    assert reader.bytes_read <= 16 * 4096 + 2 * BLOCK_BYTES


def test_a_half_written_version_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, coded(10, 6), rows(coded(10, 6), 4)[:2])
    with pytest.raises(VersionUnsealed, match=r"version 1 in .* is half written: it has shards"):
        StoreReader(tmp_path, 1)
    with pytest.raises(VersionUnsealed) as caught:
        seal(tmp_path, "run", 1, 4)
    assert caught.value.faults == (
        "rank 2 has written nothing",
        "rank 3 has written nothing",
        "w: nobody wrote [6:10, 0:6]",
    )
    assert sealed_versions(tmp_path) == ()


def test_shards_of_another_run_are_not_sealed(tmp_path: Path) -> None:
    write(tmp_path, coded(2, 2), [[Region.whole((2, 2))]])
    with pytest.raises(VersionUnsealed, match="rank 0 wrote for run run, not other"):
        seal(tmp_path, "other", 1, 1)


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_shard_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    stored(tmp_path)
    file = folder_of(tmp_path, 1) / shard_name(1)
    raw = bytearray(file.read_bytes())
    if damage == "flip":
        raw[-1] ^= 1
    else:
        del raw[-4:]
    file.write_bytes(raw)
    reader = StoreReader(tmp_path, 1)
    reader.read(W, Region((0, 0), (3, 6)))
    with pytest.raises(VersionDamaged, match=r"w \[3:6, 0:6\] in rank-00001.safetensors is not"):
        reader.read(W, Region((5, 0), (1, 6)))


def test_a_damaged_manifest_is_refused_by_name(tmp_path: Path) -> None:
    stored(tmp_path)
    manifest = folder_of(tmp_path, 1) / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-10])
    with pytest.raises(VersionDamaged, match="its manifest cannot be read"):
        StoreReader(tmp_path, 1)


def test_versions_never_change_and_belong_to_a_run(tmp_path: Path) -> None:
    stored(tmp_path)
    with pytest.raises(StoreError, match="is sealed; its bytes never change"):
        write(tmp_path, coded(10, 6), rows(coded(10, 6), 4))
    with pytest.raises(StoreError, match="is of run run, not other"):
        StoreReader(tmp_path, 1, run_id="other")
    with pytest.raises(StoreError, match="holds no tensor v"):
        StoreReader(tmp_path, 1).read(FQN("v"), Region((), ()))


def test_old_versions_are_retired_and_a_slow_reader_is_told(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        stored(tmp_path, version)
    slow = StoreReader(tmp_path, 1)
    assert retire(tmp_path, keep=2) == (1,)
    assert sealed_versions(tmp_path) == (2, 3)
    with pytest.raises(VersionGone, match="was retired while it was read"):
        slow.read(W, Region((0, 0), (1, 6)))
    with pytest.raises(VersionGone, match="is not there, or was retired"):
        StoreReader(tmp_path, 1)
    with pytest.raises(StoreError, match="keep=0"):
        retire(tmp_path, keep=0)


def test_two_versions_are_read_at_once_while_a_third_is_written(tmp_path: Path) -> None:
    written = {version: stored(tmp_path, version) for version in (1, 2)}
    readers = {version: StoreReader(tmp_path, version) for version in written}
    for row in range(10):
        if row == 5:
            stored(tmp_path, 3)
        for version, reader in readers.items():
            region = Region((row, 0), (1, 6))
            assert torch.equal(reader.read(W, region), cut(written[version], region))


def test_tied_weights_are_written_once_and_read_under_both_names(tmp_path: Path) -> None:
    values, whole = coded(4, 3), Region.whole((4, 3))
    names = (FQN("embed"), FQN("head"))
    layout = RankLayout(
        GroupRank(0), tuple(TensorLayout(name, (4, 3), "float32", (whole,)) for name in names)
    )
    write_shard(tmp_path, "run", 1, layout, lambda _, region: cut(values, region))
    seal(tmp_path, "run", 1, 1)
    assert list(load_file(folder_of(tmp_path, 1) / shard_name(0))) == ["embed#0"]
    for name in names:
        assert torch.equal(StoreReader(tmp_path, 1).read(name, whole), values)
