"""The command, and the document's tables from it."""

import json
from pathlib import Path

from click.testing import CliRunner, Result
from tests.unit.test_cli import CASE

from reshard.cli import main
from reshard.simulation.report import published_table

PERFORMANCE = Path(__file__).parents[3] / "docs/performance.md"


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, ("simulate", *arguments), input=stdin)


def methods(*arguments: str, stdin: str = "") -> dict[str, dict[str, float]]:
    result = run(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    found: dict[str, dict[str, float]] = json.loads(result.stdout)["methods"]
    return found


def test_a_model() -> None:
    found = methods("--model", "qwen3-8b", "--trainer", "fsdp=8", "--engine", "tp=8")
    assert list(found) == [
        "gather, rank 0 broadcasts",
        "gather, all ranks broadcast",
        "vLLM nccl_m2n",
        "NeMo-RL nccl_reshard",
        "gather, then pull",
        "reshard",
    ]
    assert found["reshard"]["redundancy"] == 1.0


def test_a_case_and_its_plan_say_the_same() -> None:
    case = json.dumps(CASE)
    plan = CliRunner().invoke(main, ("plan", "-", "--json"), input=case).stdout
    rates = ("--link-gbps", "1e-9", "--gpus-per-node", "1", "--latency-us", "0")
    of_case = methods("-", *rates, stdin=case)
    of_plan = methods("-", *rates, stdin=plan)
    assert of_case["reshard"]["seconds"] == of_plan["reshard"]["seconds"]
    assert of_plan.keys() == {"reshard"}
    # 64 bytes leave each trainer rank: 512 bits at a bit a second.
    assert round(of_case["reshard"]["seconds"], 3) == 512


def test_the_table() -> None:
    result = run("-", "--nodes", "1", stdin=json.dumps(CASE))
    assert result.exit_code == 0
    assert result.stdout.startswith("method")
    assert "gather, rank 0 broadcasts" in result.stdout


def test_bad_input() -> None:
    for arguments, text in (
        ((), "give either a plan or a case, or --model"),
        (("--model", "qwen3-8b", "--trainer", "fsdp"), "parallelism 'fsdp'"),
        (
            ("--model", "qwen3-8b", "--trainer", "fsdp=8", "--engine", "tp=8", "--nodes", "1"),
            "16 ranks do not fit on 1 nodes of 8",
        ),
        (
            ("--model", "qwen3-8b", "--trainer", "tp=1", "--engine", "tp=1", "--link-gbps", "0"),
            "link_gbps = 0.0: expected more than 0",
        ),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert text in result.stderr
    result = run("-", stdin='{"transfers": [{"source_rank": 0}]}')
    assert result.exit_code == 2
    assert "this is not what `reshard plan --json` prints" in result.stderr
    assert "not a planning case" in run("-", stdin="{").stderr


def test_the_table_of_published_figures_is_the_document() -> None:
    assert published_table() in PERFORMANCE.read_text()
