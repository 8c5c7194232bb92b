"""Errors of the user's making: one message on stderr and status 1, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
