"""The parity experiment on a real engine, in short: every way trains, within its bound."""

import io
import json
from pathlib import Path

import pytest
from examples.echo_parity import run_all, write_json
from examples.parity.experiment import Engine, Experiment
from examples.parity.live import Live
from examples.parity.task import counting
from rich.console import Console
from tests.support.engine_pool import EnginePool

pytestmark = pytest.mark.engine("llama", 1)

STEPS = 4


def test_every_way_trains_within_its_bound(engines: EnginePool, tmp_path: Path) -> None:
    spec = engines.spec("llama", 1)
    server = engines.shared(spec)
    experiment = Experiment(
        counting(), spec.model, (Engine(server.url, 16),), batch=2, samples=4, steps=STEPS
    )
    console = Console(file=io.StringIO())
    with Live(console, experiment) as live:
        runs = run_all(experiment, 1, live)
    assert server.weight_version() == str(STEPS)
    write_json(runs, experiment, tmp_path / "parity.json")

    found = json.loads((tmp_path / "parity.json").read_text())["runs"]
    bounds = {"co-located": 0, "sequential": 0, "asynchronous 1": 1, "asynchronous 4": 4}
    assert [run["way"] for run in found] == list(bounds)
    for run in found:
        assert len(run["rewards"]) == STEPS
        assert sum(run["staleness"].values()) == STEPS * 2
        assert max(map(int, run["staleness"])) <= bounds[run["way"]]
        assert 0 <= run["trainer_idle"] <= 1
        if bounds[run["way"]] == 0:  # the trainer's own weights sampled them (here in bf16)
            assert max(run["log_probability_gaps"]) < 0.05
        shares = list(run["engines_idle"].values())
        assert len(shares) == (run["way"] != "co-located")
        assert all(0 <= share <= 1 for share in shares)
