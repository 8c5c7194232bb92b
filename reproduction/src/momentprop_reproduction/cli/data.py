"""momentprop data: list, download and check the data of the experiments."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from momentprop.errors import MomentpropError

data = typer.Typer(name="data", no_args_is_help=True, help="The data of the experiments: UCI sets, CIFAR-10.")

_Root = Annotated[
    Path | None, typer.Option("--data", help="Look here only. Default: MOMENTPROP_DATA, then the downloads.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@data.command("list")
def list_sets(root: _Root = None, as_json: _Json = False) -> None:
    """Every set: what it is, how large its download is, and where it was found."""
    with _errors("list"):
        from momentprop_reproduction.data.catalogue import SETS
        from momentprop_reproduction.data.checking import find
        from momentprop_reproduction.data.location import search_path

        search_path(root)  # a folder that is named but not there is an error, not an empty folder
        rows: list[dict[str, Any]] = []
        for name, published in SETS.items():
            path = find(name, root)
            rows.append(
                {
                    "name": name,
                    "content": published.about,
                    "download": published.size,
                    "found": None if path is None else str(path),
                }
            )
    shown = [
        [row["name"], row["content"], f"{row['download'] / 1e6:.1f} MB", row["found"] or "-"] for row in rows
    ]
    _print(rows, shown, ("set", "content", "download", "found"), as_json)


@data.command("get")
def get_sets(
    names: Annotated[list[str], typer.Argument(help="Names of sets, or `all`.")],
    to: Annotated[Path | None, typer.Option(help="Folder to download to. Default: the cache.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Download also what is there already.")] = False,
) -> None:
    """Download sets from their public homes and verify their checksums."""
    with _errors("get"):
        from momentprop_reproduction.data.catalogue import SETS, known
        from momentprop_reproduction.data.checking import find
        from momentprop_reproduction.data.getting import get

        for name in known(names):
            there = None if force or (to is not None and not to.exists()) else find(name, to)
            if there is not None:
                print(f"{name}: already there, {there} (--force downloads it all the same)")
                continue
            with _bar(name, SETS[name].size) as progress:
                path = get(name, to, progress=progress)
            print(f"{name}: {path}")


@data.command("check")
def check_sets(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of sets. Default: all that are there.")
    ] = None,
    root: _Root = None,
    as_json: _Json = False,
) -> None:
    """Read the sets that are there and verify shapes, counts and checksums; status 1 if one is damaged."""
    with _errors("check"):
        from momentprop_reproduction.data.catalogue import known
        from momentprop_reproduction.data.checking import examine
        from momentprop_reproduction.data.location import search_path

        search_path(root)
        findings = [examine(name, root) for name in known(names or ["all"])]
    rows: list[dict[str, Any]] = [
        {
            "name": f.name,
            "status": "not there" if f.path is None else "sound" if f.sound else "damaged",
            "detail": f.detail,
            "found": None if f.path is None else str(f.path),
        }
        for f in findings
    ]
    _print(rows, [[r["name"], r["status"], r["detail"]] for r in rows], ("set", "status", "detail"), as_json)
    # a set that was asked for by its name has to be there
    if any(not f.sound or (names and f.path is None) for f in findings):
        raise typer.Exit(1)


@contextmanager
def _errors(verb: str) -> Iterator[None]:
    """Errors of the user's making as one line and status 1."""
    try:
        yield
    except (MomentpropError, OSError) as error:
        _fail(verb, str(error))


def _fail(verb: str, message: str) -> None:
    Console(stderr=True).print(f"[red]momentprop data {verb} failed:[/red] {escape(message)}")
    raise typer.Exit(1)


@contextmanager
def _bar(name: str, size: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, told the bytes as they come."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=size)
        yield lambda count: progress.advance(task, count)


def _print(
    rows: list[dict[str, Any]], cells: list[list[str]], columns: tuple[str, ...], as_json: bool
) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(*columns)
    table.columns[0].no_wrap = True
    table.columns[-1].overflow = "fold"  # paths and errors are shown whole
    for row in cells:
        table.add_row(*map(escape, row))
    # one line per set for grep, where there is no screen to fit
    Console(width=None if sys.stdout.isatty() else 300).print(table)
