"""momentprop results: the page with all results, from the files that `momentprop reproduce` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from momentprop_reproduction.page.page import page
from momentprop_reproduction.running.units import write_bytes


def results(
    source: Annotated[Path, typer.Option("--in", help="Folder with toy.json, uci.json, cifar.json.")] = Path(
        "results"
    ),
    out: Annotated[Path | None, typer.Option(help="The page; by default it is printed.")] = None,
    images: Annotated[str, typer.Option(help="Where the figures lie, seen from the page.")] = "images",
) -> None:
    """Put the results of the experiments beside the paper's, as a page of Markdown."""
    try:
        text = page(source, images)
        if out is None:
            print(text, end="")
        else:
            write_bytes(out, text.encode())
    except (OSError, ValueError, KeyError) as error:
        reason = f"{error!r}" if isinstance(error, KeyError) else str(error)
        Console(stderr=True).print(f"momentprop results failed: {reason}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
