"""What the documents say is what the code does: the line, the flag, the errors, the links."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SOURCES = ("shared/reshard", "trainer_plugin/reshard_trainer", "vllm_plugin/reshard_vllm")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
HOLE = "\0"
"""Stands for a value in a message."""


@pytest.fixture(scope="module")
def messages() -> list[str]:
    """Every text in the sources, adjacent literals joined, its values as holes."""
    trees = (
        ast.parse(path.read_text()) for folder in SOURCES for path in (ROOT / folder).rglob("*.py")
    )
    return [
        text for tree in trees for node in ast.walk(tree) if (text := text_of(node)) is not None
    ]


def text_of(node: ast.AST) -> str | None:
    """The text of a string or f-string."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or HOLE for part in parts)
        case _:
            return None


def is_said(promised: str, said: Iterable[str]) -> bool:
    """Whether some message holds a promised text, in which `...` stands for any value."""
    pattern = re.compile(".*".join(re.escape(part) for part in promised.split("...")), re.DOTALL)
    return any(pattern.search(text) for text in said)


def promised_errors() -> list[str]:
    """The errors of our own in the README's table."""
    rows = re.findall(r"^\| `([^`]+)`[^|]*\|", README, re.MULTILINE)
    assert len(rows) > 8, rows
    return rows


@pytest.mark.parametrize("promised", promised_errors())
def test_error_in_the_readme_is_one_that_the_code_says(promised: str, messages: list[str]) -> None:
    assert is_said(promised, messages)


def test_error_check_sees_a_text_that_nothing_says() -> None:
    said = [f"engine {HOLE} is up", "no answer from x in phase y"]
    assert is_said("no answer from ... in phase", said)
    assert not is_said("engine ... is down", said)


def test_line_in_the_readme_is_the_one_of_the_example() -> None:
    example = (ROOT / "examples/grpo_tiny.py").read_text()
    line = "hook = reshard_trainer.attach(model, optimizer, engines=["
    assert line in README
    assert line in example
    assert """'{"backend": "reshard"}'""" in README
    assert """'{"backend": "reshard"}'""" in example


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text())
    missing = [
        link
        for link in links
        if not link.startswith("https://") and not (document.parent / link).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("target", re.findall(r"^ +make (\w+)", README, re.MULTILINE))
def test_command_in_the_readme_is_a_target(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def named_tests(document: str) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", (ROOT / "docs" / document).read_text())


def is_a_test(named: str) -> bool:
    """Whether `path::function` names a test."""
    path, _, function = named.partition("::")
    if not (ROOT / path).is_file():
        return False
    tree = ast.parse((ROOT / path).read_text())
    return function in {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_tests_named_in_the_field_reports_exist() -> None:
    named = named_tests("field_reports.md")
    assert len(named) > 30
    assert [name for name in named if not is_a_test(name)] == []
    assert not is_a_test("tests/test_documents.py::test_of_nothing")


def test_every_trap_of_recording_has_a_test() -> None:
    document = (ROOT / "docs" / "recording.md").read_text()
    traps = dict(re.findall(r"^\| (T\d+) \|(.*)$", document, re.MULTILINE))
    assert sorted(traps, key=lambda trap: int(trap[1:])) == [f"T{n}" for n in range(1, 19)]
    assert [trap for trap, row in traps.items() if "`tests/" not in row] == []
    assert [named for named in named_tests("recording.md") if not is_a_test(named)] == []
