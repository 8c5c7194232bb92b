"""Prints tables on stdout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> None:
    """Print a table whose first columns are names, and whose others are numbers."""
    table = Table(title=escape(title), title_justify="left", padding=(0, 0))
    for i, column in enumerate(header):
        table.add_column(escape(column), justify="left" if i < names else "right", no_wrap=i < names)
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
