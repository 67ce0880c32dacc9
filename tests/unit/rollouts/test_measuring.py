"""Numbers and log lines of a run."""

import json
import logging

from reshard.ids import PolicyVersion
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
