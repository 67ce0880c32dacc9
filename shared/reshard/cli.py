"""The `reshard` command.

Sub-commands of other packages are found through the entry-point group `reshard.commands`, so that
this package imports none of them. Each entry point names a click command; its module should import
nothing heavy, since `reshard --help` imports it.
"""

import json
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import BinaryIO, Final

import click

from reshard.errors import ReshardError
from reshard.plan.case import Case, read_case
from reshard.plan.model import TransferPlan
from reshard.plan.page import as_page
from reshard.plan.report import as_json, as_text
from reshard.simulation.command import simulate

COMMANDS: Final = "reshard.commands"
"""Entry-point group of sub-commands."""


class _Commands(click.Group):
    """A group that looks up further commands among the installed packages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_installed()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = super().get_command(ctx, cmd_name)
        entry = _installed().get(cmd_name)
        if known is not None or entry is None:
            return known
        try:
            command = entry.load()
        except Exception as error:
            # Another package's fault must not take the other commands away.
            return _broken(entry, f"{type(error).__name__}: {error}")
        if not isinstance(command, click.Command):
            return _broken(entry, f"{entry.value} is a {type(command).__name__}, not a command")
        return command


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=COMMANDS)}


def _broken(entry: EntryPoint, reason: str) -> click.Command:
    """A command that only says why it does not exist."""

    @click.command(
        name=entry.name,
        short_help=f"(cannot be loaded from {entry.value})",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def broken() -> None:
        raise click.ClickException(f"{entry.name} cannot be loaded from {entry.value}: {reason}")

    return broken


@click.group(cls=_Commands)
@click.version_option(package_name="reshard")
def main() -> None:
    """Weights from any trainer sharding into a live vLLM engine."""


@main.command()
@click.argument("case", type=click.File("rb"))
@click.option("--json", "as_json_", is_flag=True, help="Print the plan as JSON.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write a page that draws the plan.",
)
def plan(case: BinaryIO, as_json_: bool, html: Path | None) -> None:
    """Print who sends what to whom.

    CASE is a JSON file (or -) that describes how tensors lie on both sides; see docs/plan.md.
    """
    described, planned = _planned(case.read())
    if html is not None:
        _write(html, as_page(described, planned))
    if as_json_:
        click.echo(json.dumps(as_json(described, planned)))
    else:
        click.echo(as_text(described, planned))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", param_hint="--html") from error


def _planned(raw: bytes) -> tuple[Case, TransferPlan]:
    try:
        case = read_case(raw)
        return case, case.plan()
    except ReshardError as error:
        click.echo(f"Error: {error}", err=True)
        raise click.exceptions.Exit(2) from error


main.add_command(simulate)


if __name__ == "__main__":
    main()
