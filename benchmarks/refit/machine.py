"""The machine that was measured on, without its name."""

import os
import platform
from pathlib import Path

import torch


def describe() -> dict[str, object]:
    """Processor, cores, memory, software."""
    return {
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _field(file: str, name: str) -> str:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"
