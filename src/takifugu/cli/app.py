"""The list of commands. Each lives in a file of its own and imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

import takifugu

app = typer.Typer(
    name="takifugu",
    help="Trains compact models: low-rank while they train, planned for the least energy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"takifugu {takifugu.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


from takifugu.cli.demo import demo  # noqa: E402
from takifugu.cli.inspect import inspect  # noqa: E402
from takifugu.cli.plan import plan  # noqa: E402
from takifugu.cli.profile import profile  # noqa: E402
from takifugu.cli.report import report  # noqa: E402
from takifugu.cli.run import run  # noqa: E402
from takifugu.cli.train import train  # noqa: E402

app.command()(demo)
app.command()(inspect)
app.command()(train)
app.add_typer(profile, name="profile")
app.command()(plan)
app.command()(run)
app.command()(report)
