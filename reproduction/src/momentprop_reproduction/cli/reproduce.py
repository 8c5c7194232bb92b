"""momentprop reproduce: run the paper's experiments again."""

from __future__ import annotations

import shlex
from dataclasses import replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from momentprop.errors import MomentpropError
from momentprop_reproduction.cli.unit_progress import UnitBars
from momentprop_reproduction.page.page import section
from momentprop_reproduction.running.executors import unfinished
from momentprop_reproduction.running.reproduction import reproduce as run


class Name(StrEnum):
    toy = "toy"
    uci = "uci"
    cifar = "cifar"


class Engine(StrEnum):
    local = "local"
    ray = "ray"


_INTERRUPTED = 130  # as shells have it: 128 + SIGINT


def reproduce(
    name: Annotated[Name, typer.Argument(help="Which experiment: section 4.1, 4.2 or 4.3 of the paper.")],
    quick: Annotated[bool, typer.Option("--quick", help="A short run, to see that it works.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where results go; results/, or results/quick/ with --quick.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Where figures go, if not to --out.")] = None,
    seed: Annotated[int, typer.Option(help="Everything but the times follows from it.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="Where the data are; else MOMENTPROP_DATA, else the download cache.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 means this one.")] = 0,
    engine: Annotated[Engine, typer.Option(help="This machine, or a Ray cluster.")] = Engine.local,
    threads: Annotated[int, typer.Option(min=1, help="Of each process.")] = 1,
) -> None:
    """Run one of the paper's experiments again and write its numbers and figures.

    An interrupted run goes on where it was: the same command again runs only what is not finished.
    """
    console = Console(stderr=True)
    out = out or Path("results/quick" if quick else "results")
    command = _command(name, quick, out, figures, seed, workers, engine, threads)
    try:
        experiment: Any = import_module(f"momentprop_reproduction.experiments.{name}")
        settings = experiment.Settings().quick() if quick else experiment.Settings()
        settings = replace(settings, seed=seed, root=data)
        out.mkdir(parents=True, exist_ok=True)
        todo = unfinished(experiment.units(settings), out / "units")
        with UnitBars(name, {unit.name: unit.work for unit in todo}, console) as bars:
            record = run(
                experiment,
                name,
                settings,
                out,
                command=command,
                figures=figures,
                workers=workers,
                engine=engine,
                threads=threads,
                progress=bars,
            )
    except KeyboardInterrupt:
        kept = out / "units"
        message = (
            f"\nInterrupted. What is finished stays in {kept}; to go on, repeat the command:\n  {command}"
        )
        console.print(message, markup=False, soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from None
    except (MomentpropError, OSError, ValueError) as error:
        console.print(f"[red]momentprop reproduce {name} failed:[/red] {escape(str(error))}")
        raise typer.Exit(1) from error
    written = [f"{name}.json", *record["figures"]]
    console.print(f"Wrote {', '.join(written)} to {out}/", markup=False)
    print(section(record), end="")


def _command(
    name: str,
    quick: bool,
    out: Path,
    figures: Path | None,
    seed: int,
    workers: int,
    engine: str,
    threads: int,
) -> str:
    """Return what to type for the same results. The data's place is left out: it is another one elsewhere."""
    words = ["momentprop", "reproduce", name] + ["--quick"] * quick + ["--out", str(out)]
    words += ["--figures", str(figures)] if figures is not None else []
    words += ["--seed", str(seed)] if seed else []
    words += ["--workers", str(workers)] if workers else []
    words += ["--engine", engine] if engine != "local" else []
    words += ["--threads", str(threads)] if threads != 1 else []
    return shlex.join(words)
