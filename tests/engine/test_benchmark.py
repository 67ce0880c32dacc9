"""The benchmark of refits, short: all methods bring the right weights, all figures are there."""

import json
from pathlib import Path

import pytest
from benchmarks.refit.command import main
from click.testing import CliRunner

METHODS = {
    "broadcast",
    "broadcast, all trainer ranks",
    "checkpoint",
    "limit",
    *(
        f"reshard {way}, {install}"
        for way in ("gloo", "shm snapshot", "shm live")
        for install in ("staged", "in_place")
    ),
}


@pytest.mark.engine("benchmark", 2)
def test_all_methods_in_one_run(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    docs = tmp_path / "page.md"
    marks = [f"<!-- {mark}refits -->\n" for mark in ("", "end of ")]
    docs.write_text("".join(["before\n", *marks, "after\n"]))
    arguments = [
        "--docs",
        str(docs),
        "--shape",
        "tiny",
        "--rounds",
        "1",
        "--json",
        "--output",
        str(output),
    ]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = json.loads(output.read_text())
    assert json.loads(done.output.splitlines()[-1]) == result
    methods = result["methods"]
    assert set(methods) == METHODS
    for name, entry in methods.items():
        assert entry["equal"], f"{name} left other weights in the engine than it should"
        assert entry["seconds"]["total"]["median"] > 0
        assert entry["ratio_to_broadcast"] > 0
        assert entry["ratio_to_limit"] > 0
        assert entry["engine_pause"]["median"] > 0
        assert entry["trainer_stall"]["median"] > 0
        assert len(entry["bytes_moved"]) == result["engine_ranks"]
        assert len(entry["peak_extra_bytes"]["engine"]) == result["engine_ranks"]
        assert len(entry["peak_extra_bytes"]["trainer"]) == result["trainer_ranks"]
        if name.startswith("reshard"):
            assert entry["redundancy"] == 1.0
        elif name != "limit":
            assert entry["redundancy"] > 1.5
    assert result["machine"]["cores"] > 0
    assert {goal["met"] for goal in result["goals"] if goal["goal"] == "redundancy"} == {True}
    lines = [line for line in docs.read_text().splitlines() if line.startswith("| checkpoint |")]
    assert lines[0].endswith("| yes |")
