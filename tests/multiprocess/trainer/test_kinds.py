"""Every kind of trainer through `attach`: real ranks, real receivers, oracles of their own."""

import logging
from pathlib import Path

import pytest
import torch
from tests.multiprocess.trainer.kinds import KINDS
from tests.multiprocess.trainer.models import make_indexed
from tests.multiprocess.trainer.peer import PeerEngine, PeerModel
from tests.multiprocess.trainer.trainers import State, Trainers, publish, shapes, step
from torch import nn
from torch.distributed.tensor import DTensor

import reshard_trainer

pytestmark = pytest.mark.multiprocess


def local_weights(state: State) -> dict[str, torch.Tensor]:
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in state.model.named_parameters()
    }


def names_sent(state: State) -> list[str]:
    assert state.hook is not None
    return [spec.name for spec in state.hook._publisher.holdings.specs]


@pytest.mark.parametrize("name", KINDS)
def test_the_engine_serves_what_the_checkpoint_would_hold(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    shapes = {name: tuple(tensor.shape) for name, tensor in kind.canonical(0).items()}
    cuts = {name: 0 for name, shape in shapes.items() if len(shape) > 1}
    with (
        PeerEngine(PeerModel(shapes, cuts)) as peer,
        Trainers(kind.size, kind.make, tmp_path) as trainers,
    ):
        trainers.attach(peer.url, **kind.settings)
        for steps in (1, 2):
            before = trainers.do(step)
            weights = peer.weights()
            for tensor, whole in kind.canonical(steps).items():
                assert torch.equal(weights[tensor], whole.float()), f"{tensor}, step {steps}"
            assert before[0].report is not None
            assert before[0].report.redundancy == 1.0
        assert set(trainers.do(names_sent)[0].value) == set(shapes)  # type: ignore[call-overload]


def test_publishing_leaves_an_adapted_model_as_it_was(tmp_path: Path) -> None:
    """Again and again: the engine has the base and one adapter, the trainer its factors."""
    kind = KINDS["PEFT on FSDP2"]
    expected = kind.canonical(0)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    with (
        PeerEngine(PeerModel(shapes)) as peer,
        Trainers(kind.size, kind.make, tmp_path) as trainers,
    ):
        before = [said.value for said in trainers.do(local_weights)]
        trainers.attach(peer.url)
        for _ in range(3):
            trainers.do(publish)
            weights = peer.weights()
            assert all(torch.equal(weights[name], whole) for name, whole in expected.items())
        after = [said.value for said in trainers.do(local_weights)]

    for old, new in zip(before, after, strict=True):
        assert isinstance(old, dict)
        assert isinstance(new, dict)
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_a_pattern_that_fits_nothing_anywhere(tmp_path: Path) -> None:
    kind = KINDS["megatron's layout in parts"]
    settings = {**kind.settings, "transforms": {"gamma*": reshard_trainer.ADD_ONE}}
    with PeerEngine(PeerModel({})) as peer, Trainers(2, kind.make, tmp_path) as trainers:
        said = trainers.fail_to_attach(peer.url, **settings)

    assert said.faults == ("transforms: 'gamma*'",)


def halved() -> nn.Module:
    return make_indexed().half()


def attach_and_listen(state: State, url: str) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.disable(logging.NOTSET)
    logging.getLogger("reshard_trainer").addHandler(handler)
    try:
        state.hook = reshard_trainer.attach(state.model, state.optimizer, [url], deadline=20)
    finally:
        logging.disable(logging.CRITICAL)
    return heard


def test_float16_for_an_engine_in_bfloat16_is_told(tmp_path: Path) -> None:
    with (
        PeerEngine(PeerModel(shapes(), dtype="bfloat16")) as peer,
        Trainers(1, halved, tmp_path) as trainers,
    ):
        (said,) = trainers.do(attach_and_listen, peer.url)

    assert isinstance(said.value, list)
    (warning,) = said.value
    assert "computes in bfloat16, the trainer holds float16" in warning
    assert "of blocks.0.down.bias (and 18 alike)" in warning
