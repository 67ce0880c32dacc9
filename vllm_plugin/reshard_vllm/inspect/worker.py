"""`python -m reshard_vllm.inspect.worker RANK SIZE RENDEZVOUS IN OUT`: a rank process.

Reads requests from one pipe and writes reports to another, one JSON line each, until the first is
closed. Many models may be inspected one after the other; a crash ends the process, not the caller.
"""

import gc
import importlib
import os
import sys
import traceback

import msgspec
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

from reshard_vllm.inspect import loading
from reshard_vllm.inspect.messages import RankReport, Request
from reshard_vllm.inspect.rank import inspect_rank


def main(rank: int, size: int, rendezvous: str, source: int, sink: int) -> None:
    """Serve requests until the pipe ends."""
    torch.set_num_threads(1)
    with os.fdopen(source, "rb") as requests, os.fdopen(sink, "wb") as reports:
        for line in requests:
            request = msgspec.json.decode(line, type=Request)
            report = _serve(request, rank, size, rendezvous)
            reports.write(msgspec.json.encode(report) + b"\n")
            reports.flush()


def _serve(request: Request, rank: int, size: int, rendezvous: str) -> RankReport:
    try:
        config = loading.config_of(request, rank)
        _join(config, rank, size, rendezvous)
        return inspect_rank(config, verify=request.verify, codings=request.codings)
    except Exception as error:
        traceback.print_exc()
        return RankReport(rank, error=f"{type(error).__name__}: {error}")
    finally:
        gc.collect()


def _join(config: VllmConfig, rank: int, size: int, rendezvous: str) -> None:
    """vLLM's groups for this request's parallelism."""
    # The platform's worker prepares torch on import, for devices that torch knows less of.
    importlib.import_module(config.parallel_config.worker_cls.rpartition(".")[0])
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            size, rank, f"file://{rendezvous}", rank, "gloo"
        )
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            config.parallel_config.tensor_parallel_size,
            config.parallel_config.pipeline_parallel_size,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
