"""The board in trainer rank 0, and two hosts made of network namespaces: death and a cut link."""

import time
from pathlib import Path

import pytest
from tests.multiprocess.transport import scenes
from tests.multiprocess.transport.ranks import Raised, Ranks
from tests.support.networks import link_to_another_host

pytestmark = pytest.mark.multiprocess


def wait_until_busy(where: Path) -> None:
    until = time.monotonic() + 40
    while not all((where / f"busy{rank}").exists() for rank in range(4)):
        assert time.monotonic() < until, "the refits do not get going"
        time.sleep(0.01)
    time.sleep(0.05)


def test_when_the_rank_that_serves_the_board_dies_everybody_ends(tmp_path: Path) -> None:
    networks: list[str] = []
    arguments = [(rank, str(tmp_path), "127.0.0.1", networks, 30.0) for rank in range(4)]
    with Ranks(scenes.served_by_rank_0, arguments) as ranks:
        wait_until_busy(tmp_path)
        ranks.kill(0)
        outcomes = ranks.results(50, [1, 2, 3])
    for outcome in outcomes:
        assert not isinstance(outcome, Raised), outcome
        _, text, took = outcome
        assert "rank 0 (trainer rank 0)" in text or "control board" in text
        assert took < 25


def test_two_hosts_and_a_cut_link(tmp_path: Path) -> None:
    """Each side gets through to the other by its own address, and notices when it cannot."""
    with link_to_another_host(near=True) as link:
        networks = [link.near, link.far]
        arguments = [(rank, str(tmp_path), link.address, networks, 3.0) for rank in range(4)]
        with Ranks(scenes.served_by_rank_0, arguments) as ranks:
            wait_until_busy(tmp_path)
            link.cut()
            outcomes = ranks.results(50)
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, Raised), outcome
        kind, text, took = outcome
        assert kind in ("PeerError", "DeadlineExceeded"), text
        assert took < 25
        if rank < 2:
            assert "(engine rank" in text
