"""A process of this host that has ended is seen, killed or not, reaped or not; others never are."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from reshard.transport.neighbours import Neighbours, Residence

HERE = Residence.own()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_counts_as_ended_once_it_has(child: subprocess.Popen[bytes]) -> None:
    neighbours = Neighbours({3: Residence(HERE.host, child.pid)})
    assert neighbours.ended([2, 3]) == set()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert neighbours.ended([2, 3]) == {3}, "not reaped"
    child.wait()
    assert neighbours.ended([2, 3]) == {3}
    assert neighbours.ended([2]) == set()
    neighbours.close()
    neighbours.close()
    assert neighbours.ended([2, 3]) == set()


def test_what_cannot_be_seen_from_here_never_has(child: subprocess.Popen[bytes]) -> None:
    elsewhere = Residence("elsewhere", child.pid)
    child.kill()
    child.wait()
    gone = Residence(HERE.host, child.pid)
    neighbours = Neighbours({0: HERE, 1: elsewhere, 2: gone})
    assert neighbours.ended([0, 1, 2]) == set()


def test_handles_are_given_back_with_their_owner(child: subprocess.Popen[bytes]) -> None:
    def handles() -> list[str]:
        links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]  # noqa: PTH208
        return [link for link in links if os.path.lexists(link) and "pidfd" in os.readlink(link)]  # noqa: PTH115

    before = len(handles())
    neighbours = Neighbours({0: Residence(HERE.host, child.pid)})
    assert len(handles()) == before + 1
    del neighbours
    assert len(handles()) == before
