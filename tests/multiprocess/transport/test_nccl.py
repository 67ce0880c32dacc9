"""The same exchanges over NCCL; needs two GPUs. Never run on this project's machines so far."""

import pytest
import torch
from tests.multiprocess.transport import scenes
from tests.multiprocess.transport.ranks import run_ranks

from reshard.board import BoardServer

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_random_worlds_arrive_exactly() -> None:
    with BoardServer() as server:
        arguments = [(server.invitation, rank, range(20, 29)) for rank in range(2)]
        assert run_ranks(scenes.refit_on_gpus, arguments, seconds=300) == [[], []]
