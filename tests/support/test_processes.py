"""What a test starts is ended, however it hides."""

import os
import sys
from pathlib import Path

import pytest
from tests.support.processes import Started, started, wait_until

pytestmark = pytest.mark.multiprocess

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()  # leaves the session, keeps the label
    if os.fork() == 0:
        time.sleep(600)
print("ready", flush=True)
time.sleep(600)
"""
MAPPED = """
import mmap, os, time
fd = os.open("/dev/shm/{name}", os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 4096)
memory = mmap.mmap(fd, 4096)
print("ready", flush=True)
time.sleep(600)
"""


def ready(tree: Started) -> None:
    assert wait_until(lambda: "ready" in tree.log.read_text(), 30), tree.log_tail()


def test_a_tree_that_ignores_sigterm_and_changes_session_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STUBBORN]
    with started(command, log=tmp_path / "log", env={}, grace_seconds=0.2) as tree:
        ready(tree)
        assert wait_until(lambda: len(tree.pids()) == 3, 10)
    assert tree.pids() == []


def test_a_killed_leader_does_not_save_its_children(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STUBBORN]
    with started(command, log=tmp_path / "log", env={}, grace_seconds=0.2) as tree:
        ready(tree)
        tree.process.kill()
        tree.process.wait(timeout=10)
        assert len(tree.pids()) == 2
    assert tree.pids() == []


def test_shared_memory_of_a_tree_is_removed(tmp_path: Path) -> None:
    segment = Path("/dev/shm", f"reshard-test-{os.getpid()}")
    command = [sys.executable, "-c", MAPPED.format(name=segment.name)]
    with started(command, log=tmp_path / "log", env={}) as tree:
        ready(tree)
        assert tree.shared_memory() == {segment}
    assert not segment.exists()
