"""The oracles of these tests can fail."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.multiprocess.trainer.peer import PeerEngine
from tests.multiprocess.trainer.test_publish import MODEL, check_serves, check_untouched
from tests.multiprocess.trainer.trainers import State, Trainers, publish, step

from reshard.board import Deadline
from reshard.errors import EngineError
from reshard_trainer.engines import HttpEngine

pytestmark = pytest.mark.multiprocess


def swap_two_elements(state: State) -> None:
    with torch.no_grad():
        weight = next(state.model.parameters())
        weight[0, 0], weight[0, 1] = weight[0, 1].clone(), weight[0, 0].clone()


def test_two_swapped_elements_are_seen(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(1, "plain", tmp_path) as trainers:
        trainers.attach(peer.url)
        trainers.do(step)
        check_serves(peer, 1)
        trainers.do(swap_two_elements)
        trainers.do(publish)

        with pytest.raises(AssertionError, match=r"embed\.weight"):
            check_serves(peer, 1)
        with pytest.raises(AssertionError):
            check_untouched(peer)


def test_calls_that_would_put_vllm_out_of_step_are_counted() -> None:
    with PeerEngine(MODEL, size=1) as peer:
        engine = HttpEngine(peer.url)
        soon = Deadline.after(10)
        engine.describe(soon)
        refused: list[Callable[[], object]] = [
            lambda: engine.finish(None, soon),
            lambda: engine.receive({}, soon),
            lambda: engine.begin(soon),
            lambda: engine.release(soon),
        ]
        for number, call in enumerate(refused):
            if number == 2:
                engine.begin(soon)
            with pytest.raises(EngineError, match="with 500: RuntimeError"):
                call()
        engine.close()

        assert peer.violations == [
            "finish without start",
            "update without start",
            "start while a weight update is active",
            "shutdown during a weight update",
        ]
