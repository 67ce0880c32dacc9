"""A publish beside generation and training: requests go on, no output mixes versions unseen."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.engine.trainers import Trainer, wrap
from tests.multiprocess.trainer.processes import join_default_group, run_ranks
from tests.support.checkpoints import Family, make_model
from tests.support.engine_pool import A, B, EnginePool
from tests.support.vllm_server import VllmServer

import reshard_trainer
from reshard_trainer.reports import RefitReport

FAMILY: Family = "qwen2"
PROMPT = (5, 6, 7)
TOKENS = 64
TRAINER = Trainer("fsdp2", 2)


def train(rank: int, url: str, share: str, folder: str) -> list[RefitReport] | None:
    """Publish weights B, then A, then B, forward and backward passes in between."""
    join_default_group(rank, TRAINER.ranks, folder)
    model = wrap(make_model(FAMILY, seed=A), TRAINER)
    versions = [wrap(make_model(FAMILY, seed=seed), TRAINER) for seed in (B, A, B)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reports = []
    with reshard_trainer.attach(
        model,
        optimizer,
        [url],
        deadline=60.0,
        transport="shm",
        share=share,  # type: ignore[arg-type]
        overlap=True,
    ) as hook:
        for version in versions:
            # Inside a step of the optimizer, as an update is: a lease holds it back.
            optimizer.register_step_pre_hook(_becomes(model, version))
            optimizer.step()
            optimizer.zero_grad()
            ids = torch.randint(0, 200, (2, 32))
            model(ids, labels=ids).loss.backward()
            report = hook.wait()
            assert report is not None
            reports.append(report)
    dist.destroy_process_group()
    return reports if rank == 0 else None


def _becomes(model: torch.nn.Module, other: torch.nn.Module):  # type: ignore[no-untyped-def]
    done: list[bool] = []

    def hook(*_: object) -> None:
        if not done:
            done.append(True)
            with torch.no_grad():
                for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                    mine.copy_(theirs)

    return hook


def generate(server: VllmServer, over: threading.Event, outputs: list[list[object]]) -> None:
    while not over.is_set():
        outputs.append(server.version_spans(PROMPT, max_tokens=TOKENS))


@pytest.mark.engine(FAMILY, 2)
@pytest.mark.parametrize("share", ["snapshot", "live"])
def test_generation_goes_on(engines: EnginePool, share: str, tmp_path: Path) -> None:
    spec = engines.spec(FAMILY, 2)
    cold = engines.cold_fingerprint(engines.spec(FAMILY, 2, seed=B))
    server = engines.shared(spec)
    over = threading.Event()
    outputs: list[list[object]] = []
    asking = threading.Thread(target=generate, args=(server, over, outputs))
    asking.start()
    try:
        reports = run_ranks(train, TRAINER.ranks, server.url, share, str(tmp_path), seconds=150)[0]
    finally:
        over.set()
        asking.join()
    assert server.fingerprint() == cold
    assert server.weight_version() == "3"
    assert isinstance(reports, list)
    for report in reports:
        assert isinstance(report, RefitReport)
        (engine,) = report.engines.values()
        assert engine.error == ""
        assert 0 < engine.pause_seconds < report.total_seconds
        assert report.stall_seconds > 0
    # Every request came to its end; what one version began, a later one went on with.
    assert outputs
    for spans in outputs:
        ends = [span["end"] for span in spans]  # type: ignore[index]
        assert ends == sorted(ends)
        assert ends[-1] == TOKENS
