"""The command: its output, its exit status, and commands of other packages."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from reshard import cli

CASE = {
    "tensors": [
        {
            "name": "w",
            "shape": [8, 8],
            "dtype": "float32",
            "source": {"mesh": [2], "ranks": [0, 1], "placements": ["S0"]},
            "destination": {
                "mesh": [4],
                "ranks": [2, 3, 4, 5],
                "placements": ["S1"],
                "dtype": "bfloat16",
            },
        }
    ]
}


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli.main, arguments, input=stdin)


@pytest.fixture
def case_file(tmp_path: Path) -> str:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(CASE))
    return str(path)


def test_a_plan_as_a_table(case_file: str) -> None:
    result = run("plan", case_file)
    assert result.exit_code == 0
    assert "0 -> 2            16 B  [0:4, 0:2]" in result.stdout
    assert result.stderr == ""


def test_a_plan_as_json_from_standard_input() -> None:
    result = run("plan", "-", "--json", stdin=json.dumps(CASE))
    assert result.exit_code == 0
    assert json.loads(result.stdout)["received_bytes"] == {"2": 32, "3": 32, "4": 32, "5": 32}


def test_a_plan_as_a_page(case_file: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = run("plan", case_file, "--json", "--html", str(page))
    assert result.exit_code == 0
    assert json.loads(result.stdout)["redundancy"] == 1.0
    assert page.read_text().startswith("<!doctype html>")


def test_a_bad_case_lists_every_fault(tmp_path: Path) -> None:
    bad = json.loads(json.dumps(CASE))
    bad["tensors"][0]["source"]["placements"] = ["Partial"]
    bad["tensors"][0]["destination"]["ranks"] = [2, 2]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(bad))
    result = run("plan", str(path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "Error: this is not a planning case\n"
        "  - w: source: placement 'Partial': each rank holds a partial sum, not elements of the "
        "tensor; redistribute it to a shard or a replica first\n"
        "  - w: destination: 2 ranks do not fill mesh (4,) of 4\n"
        "  - w: destination: ranks [2] are repeated\n"
    )


def test_a_case_that_cannot_be_planned() -> None:
    bad = json.loads(json.dumps(CASE))
    bad["tensors"][0]["dtype"] = "int32"
    result = run("plan", "-", stdin=json.dumps(bad))
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: no plan can join the source and the destination\n"
        "  - w: int32 at the source cannot be cast to bfloat16\n"
    )


def test_a_file_that_is_not_there() -> None:
    result = run("plan", "nowhere.json")
    assert result.exit_code == 2
    assert "nowhere.json" in result.stderr


def test_a_page_that_cannot_be_written(case_file: str, tmp_path: Path) -> None:
    result = run("plan", case_file, "--html", str(tmp_path / "absent" / "plan.html"))
    assert result.exit_code == 2
    assert "plan.html" in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_input_in_a_real_process_shows_no_traceback() -> None:
    command = [sys.executable, "-m", "reshard.cli", "plan", "-"]
    done = subprocess.run(command, input=b"{", capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"Error: this is not a planning case\n  - malformed JSON: ")
    assert b"Traceback" not in done.stderr


@click.command()
def inspect() -> None:
    """Look at a model."""
    click.echo("looked")


not_a_command = "a string"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of other packages: a good one, a missing one, one of the wrong type."""
    values = {
        "inspect": f"{__name__}:inspect",
        "absent": "no_such_package:command",
        "wrong": f"{__name__}:not_a_command",
        "plan": f"{__name__}:inspect",
    }
    monkeypatch.setitem(sys.modules, __name__, sys.modules[inspect.callback.__module__])
    entries = [EntryPoint(name, value, cli.COMMANDS) for name, value in values.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries)


def test_commands_of_other_packages(installed: None) -> None:
    assert run("inspect").stdout == "looked\n"
    listed = run("--help").stdout
    assert "Look at a model." in listed
    assert "(cannot be loaded from no_such_package:command)" in listed


def test_a_command_that_cannot_be_loaded(installed: None) -> None:
    result = run("absent", "--any", "thing")
    assert result.exit_code == 1
    assert "absent cannot be loaded from no_such_package:command: ModuleNotFound" in result.stderr
    assert "not_a_command is a str, not a command" in run("wrong").stderr


def test_no_package_replaces_a_command_of_ours(installed: None, case_file: str) -> None:
    assert "0 -> 2" in run("plan", case_file).stdout


def test_no_such_command() -> None:
    result = run("paln")
    assert result.exit_code == 2
    assert "No such command 'paln'" in result.stderr
