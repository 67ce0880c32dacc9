"""How fast an engine gets a trainer's weights, by every method, in one run on this machine.

A trainer of two FSDP2 ranks with fp32 masters, a real vLLM server at tensor parallel 2 in bf16,
random weights. Run as `python -m benchmarks.refit`.
"""

import json
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import click
from tests.multiprocess.trainer.processes import run_ranks
from tests.support.vllm_server import EngineSpec, vllm_server

from benchmarks.refit import machine
from benchmarks.refit.goals import judge
from benchmarks.refit.ranks import Turn, make_checkpoint, measure
from benchmarks.refit.results import figures
from benchmarks.refit.shapes import Shape, config
from benchmarks.refit.table import show, write

TRAINER_RANKS = 2
ENGINE_RANKS = 2
PLAIN_LINEARS = (("ONEDNN_MAX_CPU_ISA", "AVX2"),)
"""Without AVX-512, vLLM leaves bf16 linears as they were loaded.

Where it packs them it empties the parameters: what a rank needs, and has, could not be told.
"""

_CHECKPOINT_SECONDS = 120
_ROUND_SECONDS = 240


def benchmark(shape: Shape, rounds: int, *, only: tuple[str, ...] = ()) -> dict[str, object]:
    """Measure all methods.

    Args:
        shape: of the model.
        rounds: how often each method takes its turn.
        only: measure methods whose names hold one of these; empty: all.
    """
    described = machine.describe()
    # In memory, where the checkpoint method has its file.
    folder = Path(tempfile.mkdtemp(prefix="reshard-benchmark-", dir="/dev/shm"))
    try:
        (folder / "model").mkdir()
        (folder / "second").mkdir()
        config(shape).save_pretrained(folder / "model")
        run_ranks(
            make_checkpoint,
            TRAINER_RANKS,
            TRAINER_RANKS,
            shape,
            str(folder),
            seconds=_CHECKPOINT_SECONDS,
        )
        spec = EngineSpec(
            folder / "model",
            ENGINE_RANKS,
            arguments=(
                "--skip-tokenizer-init",
                *("--worker-extension-cls", "benchmarks.refit.engine_side.BenchmarkExtension"),
            ),
            env=PLAIN_LINEARS,
            apart=False,
        )
        with vllm_server(spec, folder / "logs") as server:
            by_rank = run_ranks(
                measure,
                TRAINER_RANKS,
                TRAINER_RANKS,
                shape,
                str(folder),
                server.url,
                rounds,
                only,
                seconds=rounds * _ROUND_SECONDS,
            )
    finally:
        shutil.rmtree(folder)
    turns = cast(list[list[Turn]], by_rank)
    measured = figures(turns)
    return {
        "methods": measured,
        "goals": judge(measured) if not only else [],
        "machine": described,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "shape": shape,
        "trainer_ranks": TRAINER_RANKS,
        "engine_ranks": ENGINE_RANKS,
        "rounds": rounds,
        "linears": "plain (received in place)",
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, not as a table.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option(
    "--shape",
    default="qwen2.5-0.5b",
    show_default=True,
    type=click.Choice(["qwen2.5-0.5b", "tiny"]),
)
@click.option(
    "--only", multiple=True, help="Measure methods whose names hold this alone; may be repeated."
)
@click.option(
    "--output",
    default="build/bench.json",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
)
@click.option(
    "--docs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Put the tables into this document, too, between its marks.",
)
def main(
    as_json: bool,
    rounds: int,
    shape: Shape,
    only: tuple[str, ...],
    output: Path,
    docs: Path | None,
) -> None:
    """Measure how fast an engine gets a trainer's weights, by every method in turn."""
    result = benchmark(shape, rounds, only=only)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    if docs is not None:
        write(result, docs)
    if as_json:
        click.echo(json.dumps(result))
        return
    show(result)
    click.echo(f"machine: {result['machine']}; all figures: {output}")
