"""Reports errors of the user's making: one message on stderr and status 1, no traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from momentprop.errors import MomentpropError


@contextmanager
def reported(verb: str) -> Iterator[None]:
    try:
        yield
    except (MomentpropError, OSError, ValueError, TypeError) as error:
        Console(stderr=True, soft_wrap=True).print(
            f"[red]momentprop {verb} failed:[/red] {escape(str(error))}"
        )
        raise typer.Exit(1) from None


def check_places(*paths: Path | None) -> None:
    """Raise if files cannot be written there: this is asked before the long part, not after it."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"{path} cannot be written: it is a folder")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path} cannot be written: no such folder")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise ValueError(f"{path} cannot be written: permission denied")
