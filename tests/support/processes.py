"""Processes that a test starts: always ended, by their group, and looked for afterwards.

Every process started here leads a process group and carries a label in its environment. By the
two, what survives kill -9 of its parent (as vLLM's workers do) is found: a process that renames
itself overwrites its environment, one that starts a group of its own keeps it.
"""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LABEL = "RESHARD_TEST_LABEL"


@dataclass(frozen=True, slots=True)
class Started:
    """A process group that a test started.

    Attributes:
        process: its leader.
        label: what every process of the tree carries in its environment.
        log: where stdout and stderr of the whole tree go.
    """

    process: subprocess.Popen[bytes]
    label: str
    log: Path

    def pids(self) -> list[int]:
        """Every living process of this tree."""
        label = f"{LABEL}={self.label}".encode()
        leader = self.process.pid
        return [
            pid
            for pid in _pids()
            if _group(pid) == leader or label in _read(pid, "environ").split(b"\0")
        ]

    def shared_memory(self) -> set[Path]:
        """Named shared memory that this tree has mapped."""
        lines = [line for pid in self.pids() for line in _read(pid, "maps").splitlines()]
        names = {os.fsdecode(line.partition(b"/dev/shm/")[2]) for line in lines}
        return {Path("/dev/shm", name) for name in names if name and "(deleted)" not in name}

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log, for an error message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def started(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str],
    grace_seconds: float = 20,
    own_session: bool = True,
) -> Iterator[Started]:
    """Start a command as the leader of its own process group; end the whole tree at exit.

    First SIGTERM, then, after `grace_seconds`, SIGKILL to whatever carries the label.

    Args:
        command: what to start.
        log: where its output goes.
        env: changes to the environment.
        grace_seconds: from SIGTERM to SIGKILL.
        own_session: Linux shares the processors out between sessions first
            (`sched_autogroup_enabled`); without one, its processes are scheduled as the caller's.
    """
    label = uuid.uuid4().hex
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env, LABEL: label},
            start_new_session=own_session,
            process_group=None if own_session else 0,
        )
    tree = Started(process, label, log)
    try:
        yield tree
    finally:
        end(tree, grace_seconds)


def end(tree: Started, grace_seconds: float) -> None:
    """End every process of a tree and remove the shared memory that it leaves."""
    segments = tree.shared_memory()
    _signal_group(tree.process.pid, signal.SIGTERM)
    wait_until(lambda: not _running(tree), grace_seconds)
    deadline = time.monotonic() + 10
    while pids := tree.pids():  # again and again: a dying parent may just have started a child
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        tree.process.poll()
        assert time.monotonic() < deadline, f"processes {pids} survive SIGKILL"
        time.sleep(0.05)
    tree.process.wait(timeout=10)
    for segment in segments:
        segment.unlink(missing_ok=True)


def wait_until(condition: Callable[[], bool], seconds: float, *, every: float = 0.05) -> bool:
    """Wait for a condition; return whether it held before the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every)
    return True


def _running(tree: Started) -> bool:
    tree.process.poll()  # reap, else the leader stays a zombie
    return bool(tree.pids())


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _read(pid: int, name: str) -> bytes:
    """A file of /proc, empty for a process that has ended meanwhile (or is a zombie)."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _group(pid: int) -> int | None:
    """Process group of a living process; None for one that has ended, or waits to be reaped."""
    state = _read(pid, "stat").rpartition(b")")[2].split()
    return int(state[2]) if state and state[0] != b"Z" else None


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
