"""Some interleavings in each way. A thousand: `make invariants`."""

import logging
from collections.abc import Iterator

import pytest
import torch
from tests.faults.invariants import WAYS, Broken, run
from tests.faults.local import Local

from reshard.session import Install, Share


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failures are what is tried here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("share", "install"), WAYS)
def test_random_interleavings(share: Share, install: Install) -> None:
    tally = run(share, install, 5)
    assert tally.runs >= 5
    assert tally.rules


def test_torn_weights_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Local.step

    def torn(world: Local) -> None:
        step(world)
        world.hook.wait()
        with world.engine.steps, torch.no_grad():
            world.engine.targets[0].live["b"][0] += 0.5

    monkeypatch.setattr(Local, "step", torn)
    with pytest.raises(Broken):
        run("snapshot", "staged", 20)


def test_weights_that_change_under_a_lease_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard_trainer.publication import Publication

    monkeypatch.setattr(Publication, "await_release", lambda publication, seconds: None)
    with pytest.raises(Broken):
        run("live", "staged", 20)
