"""The benchmark's part inside vLLM's workers: baselines, and the limit that no method can pass.

vLLM appends `BenchmarkExtension` to its worker's bases (`--worker-extension-cls`), so every name
is prefixed. A method that raises would leave vLLM's worker replies out of step, which ends a
benchmark anyway.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Protocol, cast

import torch

from benchmarks.refit.groups import GlooGroup
from benchmarks.refit.memory import Memory, reset_peak


class _Loadable(Protocol):
    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> object: ...


class BenchmarkExtension:
    """Methods that vLLM adds to its worker."""

    def bench_join(self, folder: str, sources: int) -> dict[str, object]:
        """Open one group a broadcasting trainer rank; it is that group's rank 0."""
        rank, size = self._bench_place()
        groups = [
            GlooGroup(f"{folder}/broadcast{source}", 1 + rank, 1 + size)
            for source in range(sources)
        ]
        self.__dict__["_bench_groups"] = groups
        return {}

    def bench_receive(self, tensors: list[tuple[str, list[int]]], dtype: str) -> dict[str, object]:
        """Receive every full tensor and have the model's loader cut it; seconds by phase.

        Args:
            tensors: name and shape; number `k` comes from source `k` modulo the sources.
            dtype: in which they travel.
        """
        model = self._bench_model()
        groups: list[GlooGroup] = self.__dict__["_bench_groups"]
        seconds = {"receive": 0.0, "load": 0.0}
        lock = threading.Lock()

        def receive_from(source: int) -> None:
            for name, shape in tensors[source :: len(groups)]:
                start = time.perf_counter()
                full = torch.empty(shape, dtype=getattr(torch, dtype))
                groups[source].broadcast(full)
                received = time.perf_counter()
                with lock:
                    cast(_Loadable, model).load_weights([(name, full)])
                    seconds["load"] += time.perf_counter() - received
                    seconds["receive"] += received - start

        with ThreadPoolExecutor(len(groups)) as pool:
            list(pool.map(receive_from, range(len(groups))))
        return {"seconds": seconds}

    def bench_prepare_limit(self) -> dict[str, object]:
        """Hold this rank's shard a second time, as fp32 and as it is; the shard's bytes."""
        live = {p.data_ptr(): p.data for p in self._bench_model().parameters()}
        self.__dict__["_bench_limit"] = [
            (each, each.to(torch.float32), each.clone()) for each in live.values()
        ]
        return {"nbytes": sum(each.nbytes for each in live.values())}

    def bench_limit(self) -> dict[str, object]:
        """Seconds of plain copies of this rank's shard: with the cast from fp32, and without."""
        held: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = self.__dict__["_bench_limit"]
        start = time.perf_counter()
        for live, masters, _ in held:
            live.copy_(masters)
        cast_ = time.perf_counter()
        for live, _, same in held:
            live.copy_(same)
        return {"seconds": {"cast": cast_ - start, "copy": time.perf_counter() - cast_}}

    def bench_drop_limit(self) -> dict[str, object]:
        """Give the second shard up."""
        self.__dict__.pop("_bench_limit", None)
        return {}

    def bench_memory(self, reset: bool) -> dict[str, object]:
        """Memory of this rank."""
        if reset:
            reset_peak()
        return asdict(Memory.now())

    def _bench_model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        return model

    def _bench_config(self) -> Any:
        return self.vllm_config  # type: ignore[attr-defined]

    def _bench_place(self) -> tuple[int, int]:
        parallel = self._bench_config().parallel_config
        return int(parallel.rank), int(parallel.world_size)
