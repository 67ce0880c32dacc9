"""The examples do what they say, and the documentation shows what they make."""

from pathlib import Path

import pytest
from examples.who_sends_what import RESHARDINGS, describe, draw, main

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
