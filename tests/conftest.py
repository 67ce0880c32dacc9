"""Order of the suite: the fast tests first, real processes next, real engines last."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# Property tests take the time that a busy machine takes; CI repeats the same examples.
settings.register_profile("untimed", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("untimed")


# What ends a run from outside (`timeout`, a CI runner) leaves no engine behind.
signal.signal(signal.SIGTERM, signal.default_int_handler)


def _order(item: pytest.Item) -> tuple[int, str, str]:
    """Cost of a test, and the engine that it uses: tests of one engine stand side by side."""
    marker = item.get_closest_marker("engine")
    if marker is None:
        return (1 if item.get_closest_marker("multiprocess") else 0, "", "")
    parameters = (
        item.callspec.params
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else {}
    )
    family, size = (*marker.args, "", "")[:2]
    return (2, str(parameters.get("family", family)), str(parameters.get("tensor_parallel", size)))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Doctests are looked for in the packages; helpers of tests are imported by tests alone."""
    if collection_path.suffix == ".py" and Path(__file__).parent in collection_path.parents:
        named = collection_path.name.startswith("test_") or collection_path.name == "conftest.py"
        return None if named else True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by cost and engine; else the order stays."""
    items.sort(key=_order)
