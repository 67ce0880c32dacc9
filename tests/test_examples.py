"""The examples do what they say, and the documentation shows what they make."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from examples.grpo_tiny import Evidence, prove
from examples.who_sends_what import RESHARDINGS, describe, draw, main
from tests.support.processes import started, wait_until

from reshard.ids import GroupRank
from reshard.layout.region import Region

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"


def test_rows_to_columns_two_tiles_a_rank_one_from_each_trainer() -> None:
    plan = RESHARDINGS["rows_to_columns"].plan()
    for engine in range(4):
        receives = plan.for_rank(GroupRank(2 + engine)).receives
        tiles = {peer: [move.region for move in moves] for peer, moves in receives.items()}
        assert tiles == {
            GroupRank(0): [Region((0, 2 * engine), (4, 2))],
            GroupRank(1): [Region((4, 2 * engine), (4, 2))],
        }
    assert plan.redundancy == 1.0


def test_columns_to_full_every_rank_gets_every_trainers_columns() -> None:
    plan = RESHARDINGS["columns_to_full"].plan()
    for engine in range(4):
        receives = plan.for_rank(GroupRank(4 + engine)).receives
        tiles = {peer: [move.region for move in moves] for peer, moves in receives.items()}
        assert tiles == {GroupRank(t): [Region((0, 2 * t), (8, 2))] for t in range(4)}
    assert plan.redundancy == 1.0


@pytest.mark.parametrize("name", RESHARDINGS)
def test_documented_picture_is_that_of_the_plan(name: str) -> None:
    assert (PICTURES / f"{name}.svg").read_text() == draw(RESHARDINGS[name]), (
        "renew it: .venv/bin/python examples/who_sends_what.py --folder docs/pictures"
    )


@pytest.mark.parametrize("name", RESHARDINGS)
def test_documented_text_is_that_of_the_plan(name: str) -> None:
    assert describe(RESHARDINGS[name]) in (ROOT / "docs/who_sends_what.md").read_text()


def test_example_prints_and_draws_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(tmp_path / "new")
    assert sorted(path.stem for path in (tmp_path / "new").iterdir()) == sorted(RESHARDINGS)
    assert capsys.readouterr().out.count("redundancy 1.000") == 2


BEFORE = Evidence({"0:w": "a", "1:w": "b"}, [[-1.0, -2.0]], ["x"])
AFTER = Evidence({"0:w": "c", "1:w": "d"}, [[-1.5, -2.5]], ["y"])


def test_the_proof_holds_for_engines_that_agree() -> None:
    assert all(holds for _, holds, _ in prove(BEFORE, AFTER, AFTER))


@pytest.mark.parametrize(
    ("before", "cold"),
    [
        (BEFORE, replace(AFTER, checksums={"0:w": "c", "1:w": "other"})),
        (BEFORE, replace(AFTER, checksums={"0:w": "c"})),
        (BEFORE, replace(AFTER, log_probabilities=[[-1.5, -2.5000001]])),
        (BEFORE, replace(AFTER, texts=["z"])),
        (AFTER, AFTER),
    ],
    ids=["other weights", "missing rank", "last bit of a log-probability", "text", "no training"],
)
def test_the_proof_can_fail(before: Evidence, cold: Evidence) -> None:
    assert sum(not holds for _, holds, _ in prove(before, AFTER, cold)) == 1


@pytest.mark.engine("llama", 2)
def test_demo_learns_and_proves_itself(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/grpo_tiny.py"), "--build", str(tmp_path)]
    with started(command, log=tmp_path / "log", env={"COLUMNS": "100"}) as demo:
        assert wait_until(lambda: demo.process.poll() is not None, 600), demo.log_tail()
        assert demo.process.returncode == 0, demo.log_tail()
        assert demo.pids() == []
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures.keys() == {
        *("steps", "versions", "reward_start", "reward_end", "refit_seconds", "received_bytes"),
        *("redundancy", "direct_bytes", "repacked_bytes", "computed_bytes", "bit_identical"),
    }
    assert figures["bit_identical"] is True
    assert figures["versions"] == figures["steps"] == 30
    assert figures["redundancy"] == 1.0
    assert figures["reward_end"] > figures["reward_start"] + 0.3
    assert figures["received_bytes"].keys() == {"0", "1"}
    by_class = (figures[f"{name}_bytes"] for name in ("direct", "repacked", "computed"))
    assert sum(by_class) == sum(figures["received_bytes"].values())
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
