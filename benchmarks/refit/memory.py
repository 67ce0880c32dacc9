"""Memory of this process, as the kernel counts it. Units: bytes."""

from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True)
class Memory:
    """What is resident.

    Attributes:
        private: anonymous pages.
        shared: pages of shared memory, other processes' included.
        resident: all of it.
        peak: the most that was resident since `reset_peak`.
    """

    private: int
    shared: int
    resident: int
    peak: int

    @classmethod
    def now(cls) -> "Memory":
        """Of this process."""
        lines = (line.partition(":") for line in _STATUS.read_text().splitlines())
        fields = {name: rest.split() for name, _, rest in lines}

        def nbytes(name: str) -> int:
            return int(fields[name][0]) * 1024

        return cls(nbytes("RssAnon"), nbytes("RssShmem"), nbytes("VmRSS"), nbytes("VmHWM"))


def reset_peak() -> None:
    """Start to measure `Memory.peak` again from what is resident now."""
    _CLEAR.write_text(_RESET_PEAK)
