"""`reshard simulate`: how long a refit takes by every method, on stated hardware."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import BinaryIO

import click

from reshard.dtypes import parse_dtype
from reshard.errors import LayoutError, PlanError, ReshardError
from reshard.plan.case import read_case
from reshard.simulation.machine import Machine
from reshard.simulation.methods import Pairs, Prediction, Refit, compare, of_model, planned
from reshard.simulation.models import MODELS, model
from reshard.simulation.parallelism import parse_parallelism
from reshard.simulation.report import as_json, as_text, published_table
from reshard.simulation.rules import NEMO_RL, VLLM_M2N


@click.command()
@click.argument("plan_or_case", type=click.File("rb"), required=False)
@click.option("--model", "name", type=click.Choice(sorted(MODELS)), help="A published model.")
@click.option("--trainer", default="", help="Its trainer, as in fsdp=256,ep=32 or tp=4,pp=2,dp=2.")
@click.option("--engine", default="", help="Its engine, as in tp=8,dp=16 or dp=16,ep=16.")
@click.option("--source-dtype", default="bfloat16", show_default=True, help="The trainer holds it.")
@click.option("--wire-dtype", default="bfloat16", show_default=True, help="The engine wants it.")
@click.option("--nodes", type=int, help="Number of nodes.  [default: as many as the ranks fill]")
@click.option("--gpus-per-node", type=int, default=8, show_default=True, help="Ranks of a node.")
@click.option("--link-gbps", type=float, default=400.0, show_default=True, help="Of one rank.")
@click.option(
    "--node-link-gbps", type=float, default=0.0, help="Of one node.  [default: its ranks' together]"
)
@click.option(
    "--local-gbps", type=float, default=3600.0, show_default=True, help="Of one rank, in its node."
)
@click.option(
    "--copy-gbps", type=float, default=13400.0, show_default=True, help="Copied by one rank."
)
@click.option("--latency-us", type=float, default=20.0, show_default=True, help="Of one message.")
@click.option(
    "--loader-us", type=float, default=30.0, show_default=True, help="Of one tensor in a loader."
)
@click.option("--bucket-mib", type=float, default=256.0, show_default=True, help="Largest message.")
@click.option("--published", is_flag=True, help="Compare with published figures instead.")
@click.option("--json", "as_json_", is_flag=True, help="Print JSON.")
def simulate(
    plan_or_case: BinaryIO | None,
    name: str | None,
    trainer: str,
    engine: str,
    source_dtype: str,
    wire_dtype: str,
    nodes: int | None,
    published: bool,
    as_json_: bool,
    **rates: float,
) -> None:
    """Predict how long a refit takes, by several methods, on stated hardware.

    PLAN_OR_CASE is a planning case (docs/plan.md), or what `reshard plan --json` made of one; or
    give --model, --trainer and --engine. Rates are gigabits a second, each way; the defaults are
    an H100 node's. The cost model: docs/performance.md.
    """
    try:
        if published:
            click.echo(published_table())
            return
        if (plan_or_case is None) == (name is None):
            raise LayoutError("give either a plan or a case, or --model; --help says more")
        if plan_or_case is not None:
            made = _of_file(plan_or_case.read())
        else:
            assert name is not None
            made = of_model(
                model(name),
                parse_parallelism(trainer),
                parse_parallelism(engine),
                parse_dtype(source_dtype),
                parse_dtype(wire_dtype),
            )
        predictions, machine = _predict(made, nodes, rates)
    except ReshardError as error:
        click.echo(f"Error: {error}", err=True)
        raise click.exceptions.Exit(2) from error
    click.echo(json.dumps(as_json(predictions, machine)) if as_json_ else as_text(predictions))


def _predict(
    made: Refit | Pairs, nodes: int | None, rates: dict[str, float]
) -> tuple[Sequence[Prediction], Machine]:
    ranks = made.ranks if isinstance(made, Refit) else max(map(max, made), default=0) + 1
    per_node = int(rates.pop("gpus_per_node"))
    filled = -(-ranks // per_node) if per_node > 0 else 0
    machine = Machine(filled if nodes is None else nodes, per_node, **rates)
    if machine.nodes < filled:
        raise LayoutError(f"{ranks} ranks do not fit on {machine.nodes} nodes of {per_node}")
    if isinstance(made, Refit):
        return list(compare(made, machine, (VLLM_M2N, NEMO_RL))), machine
    return [planned(made, machine)], machine


def _of_file(raw: bytes) -> Refit | Pairs:
    """A case as a refit; a plan as what goes from rank to rank."""
    try:
        document = json.loads(raw)
    except ValueError:
        document = None  # The reader of cases says what is wrong.
    if isinstance(document, dict) and "transfers" in document:
        return _pairs(document["transfers"])
    case = read_case(raw)
    sources, destinations = case.sides()
    return Refit(sources, destinations, (tuple(map(int, case.source_ranks)),), {})


def _pairs(transfers: object) -> Pairs:
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    try:
        for each in transfers:  # type: ignore[attr-defined]
            source, destination = int(each["source_rank"]), int(each["destination_rank"])
            if source != destination:
                pairs[source, destination] += int(each["bytes"])
    except (TypeError, KeyError, ValueError) as error:
        raise PlanError(
            "this is not what `reshard plan --json` prints: a transfer without source_rank, "
            f"destination_rank or bytes ({type(error).__name__}: {error})"
        ) from error
    return pairs
