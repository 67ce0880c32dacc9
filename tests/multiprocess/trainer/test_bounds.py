"""Bounded memory: tensors far larger than what a rank may take beside its weights."""

from pathlib import Path

import pytest
import torch
from tests.multiprocess.trainer.peer import PeerEngine, PeerModel
from tests.multiprocess.trainer.trainers import STEP, State, Trainers, publish, step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.multiprocess

SIDE = 512
BUDGET = 1024
LARGE = PeerModel({"weight": (SIDE, SIDE)}, {"weight": 1}, "bfloat16")
"""One tensor of 1 MiB of masters, which the engine casts, and cuts across the trainer's cut."""


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest new tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        held = {_address(each) for each in args if isinstance(each, torch.Tensor)}
        for each in result if isinstance(result, list | tuple) else [result]:
            if isinstance(each, torch.Tensor) and _address(each) not in held:
                self.largest = max(self.largest, each.nbytes)
        return result


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def take_large(state: State) -> None:
    """Train one large matrix from now on."""
    model = nn.Linear(SIDE, SIDE, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(SIDE * SIDE).view(SIDE, SIDE))
    fully_shard(model)
    state.model = model
    state.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)


def publish_counting(state: State) -> int:
    """Publish; the largest allocation that it made on this rank."""
    with Allocations() as allocations:
        publish(state)
    largest: int = allocations.largest
    return largest


@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_a_tensor_larger_than_the_budget(transport: str, tmp_path: Path) -> None:
    with PeerEngine(LARGE) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.do(take_large)
        settings = {"install": "in_place", "buffer_bytes": BUDGET, "verify": "never"}
        trainers.attach(peer.url, transport=transport, **settings)
        trainers.do(step)
        masters = torch.arange(SIDE * SIDE).view(SIDE, SIDE) + STEP
        first = masters.bfloat16().float()
        assert torch.equal(peer.weights()["weight"], first)
        said = trainers.do(publish_counting)
        assert torch.equal(peer.weights()["weight"], first)
        assert all(isinstance(each.value, int) and each.value <= BUDGET for each in said)
        report = said[0].report
        assert report is not None
        (engine,) = report.engines.values()
        assert len(engine.extra_bytes) == 4
        assert max(engine.extra_bytes) <= BUDGET
        # The senders cast, the receivers get each row where it belongs.
        assert min(engine.extra_bytes[:2]) > 0


def test_without_a_budget_the_snapshot_is_in_the_report(tmp_path: Path) -> None:
    with PeerEngine(LARGE) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.do(take_large)
        trainers.attach(peer.url, transport="shm")
        said = trainers.do(step)
        report = said[0].report
        assert report is not None
        (engine,) = report.engines.values()
        # Both trainer ranks show their half in bf16; the plain engine has no shadow.
        half = SIDE * SIDE * 2 // 2
        assert engine.extra_bytes == (half, half, 0, 0)


def test_a_snapshot_beyond_the_budget_is_refused(tmp_path: Path) -> None:
    with PeerEngine(LARGE) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.do(take_large)
        settings = {"install": "in_place", "buffer_bytes": BUDGET}
        refused = trainers.fail_to_attach(peer.url, transport="shm", **settings)
        assert "takes more than the 1024 bytes of buffer_bytes" in refused.text
