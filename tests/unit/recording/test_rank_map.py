"""The engine's ranks, replicas included, are numbered without gaps or repetitions."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig

from reshard_vllm.vllm_target import VllmTarget


def rank_of(
    replicas: int, tensor: int, stages: int, replica: int, rank: int, *, dense: bool = False
) -> tuple[int, int]:
    """Rank and size as the worker of `rank` in a replica tells them."""
    parallel = ParallelConfig(
        data_parallel_size=replicas,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        data_parallel_rank=replica,
        distributed_executor_backend="mp",
    )
    parallel.data_parallel_index = replica
    if dense:  # as vLLM's engine core does
        parallel.reconfigure_for_independent_dp_rank()
    parallel.rank = rank
    config: Any = SimpleNamespace(parallel_config=parallel)
    target = VllmTarget(config, torch.device("cpu"), torch.nn.Module())
    return target.rank, target.size


@pytest.mark.parametrize(
    ("replicas", "tensor", "stages"), [(2, 2, 1), (2, 2, 2), (3, 1, 2), (1, 4, 1)]
)
def test_a_bijection(replicas: int, tensor: int, stages: int) -> None:
    places = itertools.product(range(replicas), range(tensor * stages))
    found = [rank_of(replicas, tensor, stages, *place) for place in places]
    assert sorted(rank for rank, _ in found) == list(range(replicas * tensor * stages))
    assert {size for _, size in found} == {replicas * tensor * stages}


def test_replicas_of_a_dense_model_do_not_know_of_each_other() -> None:
    places = itertools.product(range(2), range(4))
    found = [rank_of(2, 2, 2, *place, dense=True) for place in places]
    assert sorted(rank for rank, _ in found) == list(range(8))
    assert {size for _, size in found} == {4}, "its own ranks, which divide all"
