"""The page about `reshard plan` says what it does."""

import re
from pathlib import Path

from reshard.plan.case import read_case
from reshard.plan.report import as_text

PAGE = (Path(__file__).parents[3] / "docs" / "plan.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_example_gives_the_printed_table() -> None:
    (case_text,) = blocks("json")
    case = read_case(case_text.encode())
    assert as_text(case, case.plan()) + "\n" == blocks("text")[1]


def test_the_example_in_code_runs() -> None:
    (code,) = blocks("python")
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["part"].receives) == 32  # type: ignore[attr-defined]
