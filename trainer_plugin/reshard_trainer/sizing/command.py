"""`reshard size`: the answer on the command line."""

import json
from dataclasses import asdict

import click

from reshard.errors import ReshardError
from reshard_trainer.sizing.answer import Sizing, size
from reshard_trainer.sizing.timeline import Usage
from reshard_trainer.sizing.workload import EngineSpeed, Workload


@click.command("size")
@click.option("--step-seconds", type=float, required=True, help="One optimizer step.")
@click.option(
    "--rollout-seconds", type=float, required=True, help="One group, in a full engine (mean)."
)
@click.option("--batch", type=int, required=True, help="Groups that one step takes.")
@click.option("--engines", type=int, default=1, show_default=True, help="Number of engines.")
@click.option("--slots", type=int, default=16, show_default=True, help="Groups at once, each.")
@click.option(
    "--refit-seconds",
    type=float,
    default=0.0,
    show_default=True,
    help="From the end of a step until the new weights are at the engine.",
)
@click.option(
    "--pause-seconds",
    type=float,
    default=0.0,
    show_default=True,
    help="How long an engine stands still for a refit.",
)
@click.option("--publish-every", type=int, default=1, show_default=True, help="Optimizer steps.")
@click.option(
    "--spread", type=float, default=0.3, show_default=True, help="Variation of group times."
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(
    step_seconds: float,
    rollout_seconds: float,
    batch: int,
    engines: int,
    slots: int,
    refit_seconds: float,
    pause_seconds: float,
    publish_every: int,
    spread: float,
    as_json: bool,
) -> None:
    """Which mode, how many engines, how much staleness, and what utilisation to expect."""
    try:
        speed = EngineSpeed(slots, rollout_seconds, refit_seconds, pause_seconds)
        workload = Workload(step_seconds, batch, (speed,) * max(0, engines), publish_every, spread)
    except ReshardError as error:
        click.echo(str(error), err=True)
        raise SystemExit(2) from error
    answer = size(workload)
    if as_json:
        click.echo(json.dumps(asdict(answer) | {"speed_up": answer.speed_up}))
    else:
        click.echo(_text(answer, engines))


def _text(answer: Sizing, engines: int) -> str:
    wanted = answer.engines_wanted
    if wanted is None:
        advice = "no number of engines is enough: refits take them longer than a step; publish less"
    else:
        advice = f"{wanted} engines keep the trainer busy; you have {engines}"
    lines = [
        f"mode            {answer.mode} (asynchronous is {answer.speed_up:.2f} times as fast)",
        f"max_staleness   {answer.max_staleness} (the least at which the gate costs nothing)",
        f"engines         {advice}",
        f"bottleneck      the {answer.bottleneck}",
        "",
        "                seconds a step   trainer busy   engines busy",
        _row("sequential", answer.sequential),
        _row("asynchronous", answer.asynchronous),
    ]
    return "\n".join(lines)


def _row(name: str, usage: Usage) -> str:
    return (
        f"{name:<15} {usage.step_seconds:>14.2f} {usage.trainer_busy:>14.0%} "
        f"{usage.engines_busy:>14.0%}"
    )
