"""`python -m benchmarks.digest`: what the digest of weights costs, against plain copies.

One thread, bf16 and fp32 matrices of the shapes of a 0.5B and of a 7B model's layers, whole and as
column shards. Methods take turns; medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from reshard.digest import digest_region
from reshard.ids import FQN
from reshard.layout.region import Region

_SHAPES: Final = {"896 x 4864": (896, 4864), "4096 x 11008": (4096, 11008)}
_NAME: Final = FQN("model.layers.0.mlp.down_proj.weight")


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(rounds: int) -> list[dict[str, object]]:
    """GB/s (1e9 bytes) of digest and copy, and their ratio, by shape, dtype and cut."""
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for shape_name, shape in _SHAPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            whole = torch.randn(shape).to(dtype)
            shard = whole[:, : shape[1] // 2]
            for cut, values in (("whole", whole), ("left half", shard)):
                region = Region((0, 0), tuple(values.shape))
                target = torch.empty(values.shape, dtype=dtype)
                methods: dict[str, Callable[[], object]] = {
                    "digest": partial(digest_region, _NAME, region, values),
                    "copy": partial(target.copy_, values),
                }
                for call in methods.values():
                    call()
                taken: dict[str, list[float]] = {name: [] for name in methods}
                for _ in range(rounds):
                    for name, call in methods.items():
                        taken[name].append(_seconds(call))
                medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
                size = values.nelement() * values.element_size() / 1e9
                rows.append(
                    {
                        "shape": shape_name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "cut": cut,
                        "digest GB/s": round(size / medians["digest"], 2),
                        "copy GB/s": round(size / medians["copy"], 2),
                        "digest / copy time": round(medians["digest"] / medians["copy"], 2),
                    }
                )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print("  ".join(rows[0]))
    for row in rows:
        print("  ".join(str(value).rjust(len(key)) for key, value in row.items()))


if __name__ == "__main__":
    main()
