"""Run a command; when it has ended, end every process that it left running.

Usage: python .ci/without_leftovers.py COMMAND...

What a dying parent orphans becomes this process's child (Linux: a child subreaper), whatever its
session, name or environment, so nothing escapes.
"""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def children() -> list[int]:
    """Living and unreaped children of this process."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def end_leftovers() -> int:
    """Kill and reap until no child is left: orphans of the killed arrive as new ones.

    Returns how many there were.
    """
    count = 0
    while pids := children():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        count += len(pids)
    return count


def main() -> int:
    """Run the command; returns its exit code."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return subprocess.run(sys.argv[1:], check=False).returncode
    finally:
        if count := end_leftovers():
            print(f"ended {count} processes that were left running", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
