"""Rank processes shared by all tests: many models are built in each, no engine is started."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.checkpoints import Family, make_checkpoint

from reshard_vllm.inspect.messages import Option, RankReport, Request
from reshard_vllm.inspect.ranks import RankPool

SECONDS = 240.0


class Ranks:
    """Two rank processes; with tensor parallel 1 each holds a whole model, one is looked at."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool

    def inspect(self, model: Path, tensor_parallel: int = 1, **fields: object) -> list[RankReport]:
        """Reports of the ranks of one model replica."""
        options: dict[str, Option] = {"dtype": "bfloat16", "max_model_len": 128}
        extra = fields.pop("options", {})
        assert isinstance(extra, dict)
        request = Request(
            str(model),
            tensor_parallel=tensor_parallel,
            options={**options, **extra},
            **fields,  # type: ignore[arg-type]
        )
        reports = self._pool.run(request, SECONDS)
        size = tensor_parallel * request.pipeline_parallel
        assert not any(report.error for report in reports), [r.error for r in reports]
        return list(reports[:size])


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks on this CPU as it is: which layers are packed depends on the machine."""
    with RankPool(2, log=tmp_path_factory.mktemp("ranks") / "packed.log") as pool:
        yield Ranks(pool)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks on a CPU without bf16 kernels of oneDNN: linear layers keep their weights."""
    log = tmp_path_factory.mktemp("ranks") / "plain.log"
    with RankPool(2, log=log, environment={"ONEDNN_MAX_CPU_ISA": "AVX2"}) as pool:
        yield Ranks(pool)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    """A tiny random checkpoint of each family."""
    folder = tmp_path_factory.mktemp("recorded")
    families: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "qwen3_moe")
    return {f: make_checkpoint(folder / f, f, seed=n) for n, f in enumerate(families)}
