"""Reports of publishes that run beside the training, and what is counted of them."""

import pytest
import torch
from tests.multiprocess.trainer.models import make_indexed
from tests.multiprocess.trainer.peer import PeerEngine
from tests.multiprocess.trainer.test_publish import MODEL
from tests.support.processes import wait_until

import reshard_trainer
from reshard_trainer.rollouts.meter import Meter

pytestmark = pytest.mark.multiprocess


def reported(hook: reshard_trainer.Hook) -> int | None:
    """The version of the last publish that has ended."""
    return hook.last_report.version if hook.last_report else None


def test_a_publish_beside_the_training_is_reported_when_it_ends_and_counted_once() -> None:
    model, meter = make_indexed(), Meter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with (
        PeerEngine(MODEL) as peer,
        reshard_trainer.attach(
            model, optimizer, [peer.url], overlap=True, on_report=meter.published
        ) as hook,
    ):
        assert hook.last_report is None
        for version in (1, 2, 3):
            optimizer.step()
            assert wait_until(lambda version=version: reported(hook) == version, 20)  # type: ignore[misc]
        report = hook.wait()
    assert report is not None
    ((name, received),) = report.received_bytes.items()
    value = meter.registry.get_sample_value
    assert value("reshard_refits_total", {"engine": name, "outcome": "done"}) == 3
    assert value("reshard_refit_bytes_total", {"engine": name}) == 3 * sum(received)


def test_a_publish_that_the_training_waits_for_stalls_it_all_the_time() -> None:
    model = make_indexed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with PeerEngine(MODEL) as peer, reshard_trainer.attach(model, optimizer, [peer.url]) as hook:
        optimizer.step()
        report = hook.last_report
    assert report is not None
    assert report.stall_seconds == pytest.approx(report.total_seconds, rel=0.2)
