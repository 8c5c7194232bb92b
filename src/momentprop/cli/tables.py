"""Prints tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_WIDTH = 200  # where there is no screen to fit: one line a row, for grep


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> None:
    """Print a table whose first columns are text and whose others are numbers; the header may be empty."""
    rows = list(rows)
    table = Table(title=escape(title) or None, title_justify="left", padding=(0, 0), show_header=bool(header))
    for i, column in enumerate(header or rows[0]):
        table.add_column(
            escape(column), justify="left" if i < names else "right", no_wrap=i == 0, overflow="fold"
        )
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)
