"""`reshard inspect`: what a refit of a vLLM model would do, without an engine and without a GPU."""

import json
import os
import tempfile
from pathlib import Path
from typing import NoReturn

import click

from reshard.errors import ReshardError
from reshard_vllm.inspect.messages import Request
from reshard_vllm.inspect.ranks import RankPool
from reshard_vllm.inspect.report import as_json, as_text, bit_identical


@click.command("inspect")
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tensor-parallel-size", "tensor_parallel", type=click.IntRange(1), default=1)
@click.option("--pipeline-parallel-size", "pipeline_parallel", type=click.IntRange(1), default=1)
@click.option("--enable-expert-parallel", "expert_parallel", is_flag=True)
@click.option("--dtype", default="auto", show_default=True, help="The engine's dtype.")
@click.option("--quantization", default=None, help="The engine's quantization method.")
@click.option("--max-model-len", type=click.IntRange(1), default=None, help="As for the engine.")
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Refit with index-coded tensors and compare with vLLM's own loading (on by default).",
)
@click.option("--timeout", default=900.0, show_default=True, help="Seconds for everything.")
@click.option("--json", "as_json_", is_flag=True, help="Print one JSON object.")
def inspect(
    model_dir: Path,
    tensor_parallel: int,
    pipeline_parallel: int,
    expert_parallel: bool,
    dtype: str,
    quantization: str | None,
    max_model_len: int | None,
    verify: bool,
    timeout: float,
    as_json_: bool,
) -> None:
    """Print where each tensor of the checkpoint in MODEL_DIR lands, and its class.

    Builds every rank of the model as vLLM's workers would, records its loader, proves which live
    parameters may be written, and refits it with tensors whose values say where they come from.

    Exit status: 0 if everything is covered and bit-identical, 1 if a tensor is refused or
    uncovered or differs, 2 if the model cannot be built.
    """
    options = {"dtype": dtype, "quantization": quantization, "max_model_len": max_model_len}
    request = Request(
        model=str(model_dir),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=expert_parallel,
        options={name: value for name, value in options.items() if value is not None},
        verify=verify,
    )
    handle, log = tempfile.mkstemp(prefix="reshard-inspect-", suffix=".log")
    os.close(handle)
    try:
        with RankPool(tensor_parallel * pipeline_parallel, log=Path(log)) as pool:
            reports = pool.run(request, timeout)
    except ReshardError as error:
        _fail(f"{error}")
    if broken := [f"rank {r.rank}: {r.error}" for r in reports if r.error]:
        _fail("vLLM cannot build this model:\n" + "\n".join(broken) + f"\nlog: {log}")
    Path(log).unlink()
    click.echo(json.dumps(as_json(reports)) if as_json_ else as_text(reports))
    incomplete = any(report.refused or report.uncovered for report in reports)
    if incomplete or bit_identical(reports) is False:
        raise click.exceptions.Exit(1)


def _fail(message: str) -> NoReturn:
    click.echo(f"Error: {message}", err=True)
    raise click.exceptions.Exit(2)
