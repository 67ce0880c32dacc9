"""An engine behind a slow link: a network namespace of limited bandwidth; nothing is timed.

The link lets some hundredths of the weights through in the time that the test takes, until it is
widened.
"""

from pathlib import Path

import pytest
import torch
from tests.multiprocess.trainer.peer import PeerEngine, PeerModel
from tests.multiprocess.trainer.test_busy_engines import SKIP, served
from tests.multiprocess.trainer.test_overlap import wait
from tests.multiprocess.trainer.trainers import STEP, Trainers, close, step
from tests.support.networks import link_to_another_host
from torch import nn

pytestmark = pytest.mark.multiprocess

SLOW, WIDE = "256kbit", "1gbit"  # 4 MiB: more than two minutes, or a moment
MODEL = PeerModel({"weight": (1024, 1024)}, {"weight": 0})


def ramp() -> nn.Module:
    model = nn.Linear(1024, 1024, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(2.0**20).reshape(1024, 1024) / 64)
    return model


def check_serves(peer: PeerEngine, version: int) -> None:
    weight = ramp().state_dict()["weight"]
    for _ in range(version):
        weight = weight + STEP
    assert torch.equal(peer.weights()["weight"], weight)
    assert peer.weight_version == str(version)
    assert peer.violations == []


def check_untouched(peer: PeerEngine) -> None:
    assert not peer.weights()["weight"].any()
    assert peer.weight_version == "default"


def test_nobody_waits_for_an_engine_behind_a_slow_link(tmp_path: Path) -> None:
    with (
        link_to_another_host() as link,
        PeerEngine(MODEL) as near,
        PeerEngine(MODEL, 1, network=link.far) as far,
        Trainers(1, ramp, tmp_path) as trainers,
    ):
        link.limit(SLOW)
        trainers.attach(
            near.url, far.url, **SKIP, transport="gloo", host=link.address, deadline=60.0
        )
        for version in (1, 2, 3):
            trainers.do(step)
            trainers.do(served, near.name, version)
            check_serves(near, version)
        # Its bytes are on their way all the while, and what they are of does not change.
        check_untouched(far)
        link.limit(WIDE)
        trainers.do(served, far.name, 1)
        check_serves(far, 1)
        trainers.do(wait)
        check_serves(far, 3)
        check_serves(near, 3)
        trainers.do(close)


def test_a_link_that_is_too_slow_ends_by_the_deadline_and_heals(tmp_path: Path) -> None:
    with (
        link_to_another_host() as link,
        PeerEngine(MODEL) as near,
        PeerEngine(MODEL, 1, network=link.far) as far,
        Trainers(1, ramp, tmp_path) as trainers,
    ):
        link.limit(SLOW)
        trainers.attach(
            near.url,
            far.url,
            transport="gloo",
            host=link.address,
            deadline=5.0,
            on_failure="continue",
        )
        (said,) = trainers.do(step)
        check_serves(near, 1)
        check_untouched(far)
        assert said.report is not None
        assert "within 5 s" in said.report.engines[far.name].error
        link.limit(WIDE)
        trainers.do(step)
        check_serves(far, 2)
        check_serves(near, 2)
