"""The board in trainer rank 0, and two hosts made of network namespaces: death and a cut link."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.multiprocess.transport import scenes
from tests.multiprocess.transport.ranks import Raised, Ranks

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


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two network namespaces with a link between them."""
    names = ["reshard-a", "reshard-b"]
    ip = shutil.which("ip")
    if ip is None:
        pytest.skip("network namespaces need the ip command")

    def run(*words: str, check: bool = True) -> bool:
        done = subprocess.run([ip or "ip", *words], capture_output=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.returncode == 0

    for name in names:
        run("netns", "del", name, check=False)
    if not run("netns", "add", names[0], check=False):
        pytest.skip("no permission to make network namespaces")
    try:
        run("netns", "add", names[1])
        run("link", "add", "rs0", "netns", names[0], "type", "veth", "peer", "rs1")
        run("link", "set", "rs1", "netns", names[1])
        for name, device, address in (
            (names[0], "rs0", "10.77.0.1/24"),
            (names[1], "rs1", "10.77.0.2/24"),
        ):
            run("-n", name, "addr", "add", address, "dev", device)
            run("-n", name, "link", "set", device, "up")
            run("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            run("netns", "del", name, check=False)


def test_two_hosts_and_a_cut_link(tmp_path: Path, networks: list[str]) -> None:
    """Each side gets through to the other by its own address, and notices when it cannot."""
    arguments = [(rank, str(tmp_path), "10.77.0.1", networks, 3.0) for rank in range(4)]
    with Ranks(scenes.served_by_rank_0, arguments) as ranks:
        wait_until_busy(tmp_path)
        subprocess.run(["ip", "-n", networks[0], "link", "set", "rs0", "down"], check=True)
        outcomes = ranks.results(50)
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, Raised), outcome
        kind, text, took = outcome
        assert kind in ("PeerError", "DeadlineExceeded"), text
        assert took < 25
        if rank < 2:
            assert "(engine rank" in text
