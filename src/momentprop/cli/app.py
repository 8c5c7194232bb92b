"""Puts the verbs of the command together."""

from __future__ import annotations

from typing import Annotated

import typer

from momentprop.cli.export import export
from momentprop.cli.inspect import inspect
from momentprop.cli.ops import ops
from momentprop.cli.validate import validate
from momentprop.cli.verbs import add_verbs
from momentprop.version import __version__

app = typer.Typer(name="momentprop", no_args_is_help=True, add_completion=False)
app.command()(export)
app.command()(inspect)
app.command()(ops)
app.command()(validate)
add_verbs(app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"momentprop {__version__}")
        raise typer.Exit


@app.callback()
def momentprop(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The uncertainty of a dropout network in one deterministic pass."""
