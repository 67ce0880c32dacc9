"""FRESH: a refitted engine is bit for bit one that was cold-loaded from the trainer's weights.

Every family at tensor parallel 1 and 2, every kind of trainer and world size, covered pairwise:
each engine goes A -> B -> A -> B -> A, each time published by another kind of trainer.
"""

from pathlib import Path

import pytest
from tests.engine.trainers import TRAINERS, Trainer, publish
from tests.multiprocess.trainer.processes import run_ranks
from tests.support.checkpoints import FAMILIES, Family
from tests.support.engine_pool import A, B, EnginePool

from reshard_trainer.reports import RefitReport

PLAIN_LINEARS = (("ONEDNN_MAX_CPU_ISA", "AVX2"),)
"""Without AVX-512, vLLM leaves bf16 linears as they were loaded: their class is direct."""


def trainers_for(family: Family, tensor_parallel: int) -> list[Trainer]:
    """Half of the kinds; the other half at the other size, swapped from family to family."""
    first = (FAMILIES.index(family) + tensor_parallel) % 2
    return list(TRAINERS[first::2])


def refit(
    trainer: Trainer,
    family: Family,
    seed: int,
    url: str,
    version: int,
    folder: Path,
    **settings: object,
) -> RefitReport:
    folder.mkdir()
    report = run_ranks(
        publish,
        trainer.ranks,
        trainer,
        family,
        seed,
        url,
        version,
        str(folder),
        settings,
        seconds=150,
    )[0]
    assert isinstance(report, RefitReport)
    return report


@pytest.mark.engine
@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_refitted_is_cold_loaded(
    engines: EnginePool, family: Family, tensor_parallel: int, tmp_path: Path
) -> None:
    # Both ways that vLLM's CPU build lays out linears are covered at each parallel size.
    plain = (FAMILIES.index(family) + tensor_parallel) % 4 < 2
    spec = engines.spec(family, tensor_parallel, env=PLAIN_LINEARS if plain else ())
    other = engines.spec(family, tensor_parallel, seed=B, env=PLAIN_LINEARS if plain else ())
    server = engines.shared(spec)
    cold = {A: engines.cold_fingerprint(spec), B: engines.cold_fingerprint(other)}
    for turn, trainer in enumerate(trainers_for(family, tensor_parallel)):
        seed = A if turn % 2 else B
        version = turn + 1
        install = "in_place" if turn >= 2 else "staged"
        report = refit(
            trainer, family, seed, server.url, version, tmp_path / str(turn), install=install
        )
        assert server.fingerprint() == cold[seed], f"{trainer} published {seed}"
        assert server.weight_version() == str(version)
        (engine,) = report.engines.values()
        assert engine.redundancy == 1.0
        assert len(engine.received_bytes) == tensor_parallel
        total = engine.direct_bytes + engine.repacked_bytes + engine.computed_bytes
        assert sum(engine.received_bytes) == total
        if plain and family != "qwen3_moe":
            assert engine.repacked_bytes == engine.computed_bytes == 0
    spans = server.version_spans((5, 6, 7))
    assert [span["version"] for span in spans] == [str(version)]  # type: ignore[index]
