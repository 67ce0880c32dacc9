"""A version in a store, brought to a real vLLM server without its trainer."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.engine.trainers import Trainer, wrap
from tests.multiprocess.trainer.processes import join_default_group, run_ranks
from tests.support.checkpoints import Family, make_model
from tests.support.engine_pool import A, B, EnginePool

import reshard_trainer
from reshard.errors import ReshardError
from reshard.ids import PolicyVersion

FAMILY: Family = "qwen2"
TRAINER = Trainer("fsdp2", 2)


def publish(rank: int, url: str, store: str, folder: str) -> None:
    """Version 1 is weights B, version 2 weights A; both stay in the store."""
    join_default_group(rank, TRAINER.ranks, folder)
    model = wrap(make_model(FAMILY, seed=A), TRAINER)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with reshard_trainer.attach(
        model, optimizer, [url], run_id="run", store=store, version=1
    ) as hook:
        for version, seed in ((1, B), (2, A)):
            hook.version = PolicyVersion(version)
            with torch.no_grad():
                theirs = wrap(make_model(FAMILY, seed=seed), TRAINER)
                for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
                    mine.copy_(other)
            hook.publish()
    dist.destroy_process_group()


@pytest.mark.engine(FAMILY, 2)
def test_an_engine_is_brought_back_to_a_stored_version(engines: EnginePool, tmp_path: Path) -> None:
    cold = {seed: engines.cold_fingerprint(engines.spec(FAMILY, 2, seed=seed)) for seed in (A, B)}
    server = engines.shared(engines.spec(FAMILY, 2))
    store = tmp_path / "store"
    run_ranks(publish, TRAINER.ranks, server.url, str(store), str(tmp_path), seconds=150)
    assert server.fingerprint() == cold[A]
    (folder,) = store.iterdir()
    report = reshard_trainer.restore([server.url], folder, version=1)
    assert server.fingerprint() == cold[B]
    assert server.weight_version() == "1"
    (engine,) = report.engines.values()
    assert not engine.error
    # Each rank has read its own part only.
    whole = sum(p.numel() * p.element_size() for p in make_model(FAMILY, seed=A).parameters())
    assert all(0 < nbytes < whole for nbytes in engine.received_bytes)
    # The newest, which a damaged shard makes unreadable: refused, and the engine is left alone.
    shard = next(iter(sorted(folder.rglob("*.safetensors"), reverse=True)))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    shard.write_bytes(content)
    with pytest.raises(ReshardError):
        reshard_trainer.restore([server.url], folder)
    assert server.fingerprint() == cold[B]
