"""Versions in a store: written by every trainer rank, installed without the trainer."""

from pathlib import Path

import pytest
import torch
from tests.multiprocess.trainer.models import Kind
from tests.multiprocess.trainer.peer import PeerEngine, PeerModel
from tests.multiprocess.trainer.test_publish import CUTS, MODEL, check_serves, check_untouched
from tests.multiprocess.trainer.trainers import Trainers, expected, shapes, step

import reshard_trainer
from reshard.errors import ReshardError
from reshard.store import StoreReader, VersionGone, VersionUnsealed
from reshard.store.manifest import MANIFEST, folder_of
from reshard.store.retire import sealed_versions

pytestmark = pytest.mark.multiprocess


def train(folder: Path, kind: Kind, ranks: int, steps: int) -> Path:
    """Train with a store; the folder of the run. The trainer is killed at the end."""
    with PeerEngine(MODEL) as peer, Trainers(ranks, kind, folder) as trainers:
        trainers.attach(peer.url, store=str(folder / "store"), keep=2)
        for _ in range(steps):
            trainers.do(step)
        check_serves(peer, steps)
    (run,) = (folder / "store").iterdir()
    return run


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp2", 3), ("ddp", 2)])
def test_a_late_engine_gets_a_stored_version_after_the_trainer_has_died(
    kind: Kind, ranks: int, tmp_path: Path
) -> None:
    run = train(tmp_path, kind, ranks, steps=3)
    assert sealed_versions(run) == (2, 3)
    assert len(list(folder_of(run, 3).glob("*.safetensors"))) == ranks
    with PeerEngine(MODEL) as late:
        report = reshard_trainer.restore([late.url], run)
        check_serves(late, 3)
        (received,) = report.received_bytes.values()
        assert (report.version, report.redundancy) == (3, 1.0)
        assert sum(received) == report.direct_bytes > 0

        assert reshard_trainer.restore([late.url], run, version=2).version == 2
        check_serves(late, 2)
        with pytest.raises(VersionGone, match=r"version 1 in .* is not there, or was retired"):
            reshard_trainer.restore([late.url], run, version=1)


def test_it_is_cast_to_the_engines_dtype(tmp_path: Path) -> None:
    run = train(tmp_path, "plain", 1, steps=1)
    with PeerEngine(PeerModel(shapes(), CUTS, dtype="bfloat16")) as late:
        reshard_trainer.restore([late.url], run)
        for name, whole in expected(1).items():
            assert torch.equal(late.weights()[name], whole.to(torch.bfloat16)), name


def test_damage_installs_nothing_and_names_the_tensor(tmp_path: Path) -> None:
    run = train(tmp_path, "fsdp2", 2, steps=1)
    part = next(
        part for part in StoreReader(run, 1).stored.parts if part.name == "blocks.0.up.weight"
    )
    file = folder_of(run, 1) / part.file
    raw = bytearray(file.read_bytes())
    raw[part.offset] ^= 1
    file.write_bytes(raw)
    with PeerEngine(MODEL) as late:
        with pytest.raises(ReshardError, match=r"blocks.0.up.weight .* is not what was written"):
            reshard_trainer.restore([late.url], run)
        check_untouched(late)


def test_a_half_written_version_is_refused_before_an_engine_is_reached(tmp_path: Path) -> None:
    run = train(tmp_path, "fsdp2", 2, steps=1)
    (folder_of(run, 1) / MANIFEST).unlink()
    with PeerEngine(MODEL) as late:
        with pytest.raises(VersionUnsealed, match=r"version 1 in .* is half written"):
            reshard_trainer.restore([late.url], run, version=1)
        with pytest.raises(VersionGone, match="holds no sealed version"):
            reshard_trainer.restore([late.url], run)
        check_untouched(late)


def test_a_store_that_cannot_be_written_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url, store=str(tmp_path / "file"))
        said = trainers.fail(step)
        assert "version 1 could not be written in" in said.text
        assert [fault[:14] for fault in said.faults] == ["trainer rank 0", "trainer rank 1"]
        check_untouched(peer)
