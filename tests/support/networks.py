"""Hosts made of network namespaces, and the links between them; all gone at the end.

Where the machine does not allow it, the test is skipped and says why.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_NEW_NETWORK = 0x40000000


@dataclass(frozen=True)
class Link:
    """From the namespace of the test, or another one, to the namespace `far`.

    Attributes:
        near: namespace of the near end; empty: the one of the test.
        far: namespace of the far end.
        device: the near end.
        address: of the near end.
    """

    near: str
    far: str
    device: str
    address: str

    def cut(self) -> None:
        """As a pulled cable."""
        _run("ip", *_within(self.near), "link", "set", self.device, "down")

    def limit(self, rate: str) -> None:
        """Let no more than `rate` (as `tc` writes it: `256kbit`) through to the far end."""
        shape = ("tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
        _run("tc", *_within(self.near), "qdisc", "replace", "dev", self.device, "root", *shape)


@contextmanager
def link_to_another_host(*, near: bool = False) -> Iterator[Link]:
    """A namespace, and a link to it: from the one of the test, or from a second one (`near`)."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"network namespaces need the {tool} command")
    label = f"reshard{os.getpid()}"
    names = {"near": f"{label}a" if near else "", "far": f"{label}b"}
    made = [name for name in names.values() if name]
    try:
        for name in made:
            if not _tried("ip", "netns", "add", name):
                pytest.skip("no permission to make network namespaces")
        ends = {"near": f"rs{os.getpid()}a", "far": f"rs{os.getpid()}b"}
        _run("ip", "link", "add", ends["near"], "type", "veth", "peer", "name", ends["far"])
        for number, (end, device) in enumerate(ends.items(), start=1):
            if names[end]:
                _run("ip", "link", "set", device, "netns", names[end])
            within = _within(names[end])
            _run("ip", *within, "addr", "add", f"10.77.0.{number}/24", "dev", device)
            _run("ip", *within, "link", "set", device, "up")
            _run("ip", *within, "link", "set", "lo", "up")
        yield Link(names["near"], names["far"], ends["near"], "10.77.0.1")
    finally:
        for name in made:
            _tried("ip", "netns", "del", name)
        _tried("ip", "link", "del", f"rs{os.getpid()}a")


def enter_network(name: str) -> None:
    """Move this thread, and what it starts, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{name}").open() as namespace:
        if libc.setns(namespace.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def _within(name: str) -> tuple[str, ...]:
    return ("-n", name) if name else ()


def _tried(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, check=False, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
