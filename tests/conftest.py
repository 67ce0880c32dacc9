"""Order of the suite: the fast tests first, real processes next, real engines last."""

import pytest


def _cost(item: pytest.Item) -> int:
    if item.get_closest_marker("engine"):
        return 2
    return 1 if item.get_closest_marker("multiprocess") else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by cost; within a cost the order stays."""
    items.sort(key=_cost)
