"""Thirty refits with failures between, and that growth is seen. Five hundred: `make soak`."""

from pathlib import Path

import pytest
from tests.faults.soak import Trend, soak, trends

pytestmark = pytest.mark.multiprocess


def test_nothing_grows_over_thirty_refits(tmp_path: Path) -> None:
    found, struck, made = soak(30, 2, tmp_path)
    assert made >= 30
    assert [str(result.case) for result in struck if not result.good] == []
    growing = [trend for trend in found if trend.grows and trend.measure != "rss_kib"]
    assert not growing


def test_growth_is_seen() -> None:
    one = {"rss_kib": 1e5, "descriptors": 20.0, "sockets": 5.0, "threads": 9.0}
    samples = [(n, {**one, "shared_mappings": float(n)}) for n in range(50)]
    growing = [trend for trend in trends({"rank": samples}) if trend.grows]
    assert [trend.measure for trend in growing] == ["shared_mappings"]
    assert growing[0].slope == pytest.approx(1.0)
    assert not Trend("rank", "threads", 9, 10, 0).grows
