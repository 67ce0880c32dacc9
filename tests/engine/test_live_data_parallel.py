"""A data-parallel engine: one refit, through one address, reaches every replica."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.trainers import TRAINERS, publish
from tests.multiprocess.trainer.processes import run_ranks
from tests.support.engine_pool import A, B, EnginePool
from tests.support.vllm_server import PROMPTS, EngineSpec, VllmServer

from reshard_trainer.reports import RefitReport

REPLICAS = 2


def log_probabilities(server: VllmServer, replica: int) -> list[tuple[float, ...]]:
    """What one replica says of the prompts."""
    said = []
    for prompt in PROMPTS:
        answer = httpx.post(
            f"{server.url}/v1/completions",
            headers={"X-data-parallel-rank": str(replica)},
            json={"model": "policy", "prompt": list(prompt), "max_tokens": 1, "prompt_logprobs": 0},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        entries: Any = answer.json()["choices"][0]["prompt_logprobs"]
        said.append(
            tuple(
                float(entry[str(token)]["logprob"])
                for entry, token in zip(entries[1:], prompt[1:], strict=True)
            )
        )
    return said


@pytest.mark.engine
def test_every_replica_is_refitted(engines: EnginePool, tmp_path: Path) -> None:
    spec = engines.spec("llama", 1)
    replicated = EngineSpec(spec.model, arguments=("--data-parallel-size", str(REPLICAS)))
    cold = {
        seed: list(engines.cold_fingerprint(engines.spec("llama", 1, seed=seed)).log_probabilities)
        for seed in (A, B)
    }
    assert cold[A] != cold[B]
    with engines.own(replicated) as server:
        for version, seed in ((1, B), (2, A)):
            folder = tmp_path / str(version)
            folder.mkdir()
            report = run_ranks(
                *(publish, 1, TRAINERS[0], "llama", seed, server.url, version),
                *(str(folder), {"install": "staged" if version == 1 else "in_place"}),
                seconds=150,
            )[0]
            assert isinstance(report, RefitReport)
            (engine,) = report.engines.values()
            assert len(engine.received_bytes) == REPLICAS
            assert len(set(engine.received_bytes)) == 1
            for replica in range(REPLICAS):
                assert log_probabilities(server, replica) == cold[seed], f"replica {replica}"
