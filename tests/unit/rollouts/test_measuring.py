"""Numbers and log lines of a run."""

import json
import logging

from reshard.ids import PolicyVersion
from reshard_trainer import rollouts
from reshard_trainer.reports import EngineReport, RefitReport
from reshard_trainer.rollouts.logs import JsonLines
from reshard_trainer.rollouts.meter import Meter
from reshard_trainer.rollouts.rollout import EngineName


def test_a_log_line_names_run_and_version() -> None:
    record = logging.LogRecord("reshard", logging.INFO, "f", 1, "engine %s joins", ("e",), None)
    line = json.loads(JsonLines("run-1", lambda: 7).format(record))
    assert (line["run"], line["version"], line["message"]) == ("run-1", 7, "engine e joins")
    assert (line["level"], line["logger"]) == ("INFO", "reshard")


def test_a_log_line_holds_the_exception() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("reshard", logging.ERROR, "f", 1, "failed", (), info)
    assert "boom" in json.loads(JsonLines("r", lambda: 0).format(record))["exception"]


def test_a_publish_is_counted_engine_by_engine() -> None:
    meter = Meter()
    good = EngineReport("a", PolicyVersion(1), seconds={"pause": 0.25}, received_bytes=(3, 4))
    bad = EngineReport("b", error="gone")
    meter.published(RefitReport(PolicyVersion(1), 1.0, {"a": good, "b": bad}))
    value = meter.registry.get_sample_value
    assert value("reshard_refits_total", {"engine": "a", "outcome": "done"}) == 1
    assert value("reshard_refits_total", {"engine": "b", "outcome": "failed"}) == 1
    assert value("reshard_refit_bytes_total", {"engine": "a"}) == 7
    assert value("reshard_refit_seconds_sum", {"engine": "a", "phase": "pause"}) == 0.25


def test_two_meters_share_no_numbers() -> None:
    first, second = Meter(), Meter()
    first.refit("e", error="", received_bytes=10, seconds={"commit": 0.5})
    first.refreshed(EngineName("e"), PolicyVersion(3))
    first.idle("engine", "e", 2.0)
    value = first.registry.get_sample_value
    assert value("reshard_refit_bytes_total", {"engine": "e"}) == 10
    assert value("reshard_refit_seconds_sum", {"engine": "e", "phase": "commit"}) == 0.5
    assert value("reshard_version", {"name": "e"}) == 3
    assert value("reshard_idle_seconds_total", {"side": "engine", "name": "e"}) == 2.0
    assert second.registry.get_sample_value("reshard_version", {"name": "e"}) is None


def test_every_public_name_is_there() -> None:
    assert all(hasattr(rollouts, name) for name in rollouts.__all__)
