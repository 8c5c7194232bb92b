"""Verbs that other distributions add to the command, as entry points in the group `momentprop.commands`.

An entry point is named like its verb. It loads a function, or a `typer.Typer` with several commands:

    [project.entry-points."momentprop.commands"]
    reproduce = "momentprop_reproduction.cli.reproduce:reproduce"
"""

from __future__ import annotations

from importlib.metadata import entry_points

import typer
from rich.console import Console

GROUP = "momentprop.commands"
REPRODUCTION = ("bench", "data", "demo", "reproduce", "results")
_ABSENT = (
    "belongs to the distribution momentprop-reproduction, which is not installed; "
    "install it from the folder reproduction/ of the source code: pip install ./reproduction"
)


def add_verbs(app: typer.Typer) -> None:
    """Add the verbs that are installed, and one-sentence answers for those of our own that are not."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name, entry in sorted(found.items()):
        try:
            verb = entry.load()
        except Exception as error:  # whatever another distribution does; the other verbs go on working
            _add_answer(app, name, f"cannot be loaded from {entry.value}: {type(error).__name__}: {error}")
            continue
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=name)
        else:
            app.command(name)(verb)
    for name in REPRODUCTION:
        if name not in found:
            _add_answer(app, name, _ABSENT)


def _add_answer(app: typer.Typer, name: str, why: str) -> None:
    """Add a hidden verb that takes any arguments, says why it does nothing, and ends with status 1."""

    def answer() -> None:
        Console(stderr=True, soft_wrap=True).print(f"momentprop {name} {why}", markup=False, highlight=False)
        raise typer.Exit(1)

    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, hidden=True, add_help_option=False, context_settings=anything)(answer)
