"""Real engines, shared by the whole session.

    @pytest.mark.engine("qwen3", 2)
    def test_something(engines: EnginePool) -> None:
        server = engines.shared(engines.spec("qwen3", 2))

The marker's arguments (or parameters named `family` and `tensor_parallel`) put tests of the same
engine side by side, so that it starts once.
"""

from collections.abc import Iterator

import pytest
from tests.support.engine_pool import EnginePool


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """The pool of real vLLM servers."""
    pool = EnginePool(tmp_path_factory.mktemp("engines"))
    yield pool
    pool.close()
