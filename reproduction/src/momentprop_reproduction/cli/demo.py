"""momentprop demo: train two small networks and compare."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from momentprop.cli.failure import reported
from momentprop.cli.tables import print_table
from momentprop.version import __version__
from momentprop_reproduction.demo import digits, toy
from momentprop_reproduction.running.timing import torch_threads

# networks this small hardly gain from a second thread, and on a busy machine waiting for it costs tenfold
_THREADS = 1
_QUICK: dict[str, dict[str, Any]] = {
    "regression": {"epochs": 200, "truth_samples": 200, "repeats": 2},
    "digits": {"epochs": 20, "truth_samples": 100, "repeats": 2},
}


def demo(
    out: Annotated[Path, typer.Option(help="Directory for the figures and results.json.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Everything but the times follows from it.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A short training, to see that it runs.")] = False,
) -> None:
    """Train a regression and a classifier, and compare plain network, MC dropout and momentprop."""
    with reported("demo"):
        _demo(out, seed, quick)


def _demo(out: Path, seed: int, quick: bool) -> None:
    from momentprop import plots  # before training, to hear at once that matplotlib is missing

    out.mkdir(parents=True, exist_ok=True)
    settings = _QUICK if quick else {"regression": {}, "digits": {}}
    with _bars() as bar, torch_threads(_THREADS):
        regression = toy.run(seed, progress=bar("toy regression"), **settings["regression"])
        classes = digits.run(seed, progress=bar("digits 0-4"), **settings["digits"])
    _print("Toy regression, trained on -3..19", regression.table)
    _print("Digits, trained on 0-4; novel: 5-9", classes.table)

    bands = plots.regression_bands(
        regression.x,
        regression.mean,
        regression.std,
        (regression.observed_x, regression.observed_y),
        regression.training_range,
    )
    histograms = plots.entropy_histograms(classes.known_entropy, classes.novel_entropy)
    roc = plots.roc_curves(classes.known_entropy, classes.novel_entropy)
    figures: dict[str, Any] = {"regression": bands[0], "entropy": histograms[0], "roc": roc}
    for name, axes in figures.items():
        axes.figure.savefig(out / f"{name}.png")

    command = ["momentprop", "demo", "--out", str(out), "--seed", str(seed)] + ["--quick"] * quick
    results = {
        "command": shlex.join(command),
        "seed": seed,
        "quick": quick,
        "versions": _versions(),
        "threads": _THREADS,
        "regression": regression.table,
        "digits": classes.table,
    }
    text = json.dumps(results, indent=2, allow_nan=False)
    (out / "results.json").write_text(text + "\n", encoding="utf-8")
    Console(stderr=True).print(f"Wrote regression.png, entropy.png, roc.png and results.json to {out}/")


@contextmanager
def _bars() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A maker of progress bars on stderr: bar(label) is called as (done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def bar(label: str) -> Callable[[int, int], None]:
            task = progress.add_task(f"{label}: training", total=None)

            def update(done: int, total: int) -> None:
                # sampling the truth follows the last epoch
                stage = "training" if done < total else "comparing"
                progress.update(task, completed=done, total=total, description=f"{label}: {stage}")

            return update

        yield bar


def _print(title: str, rows: dict[str, dict[str, float | None]]) -> None:
    """One row per method on stdout."""
    columns = next(iter(rows.values()))
    cells = [
        [method, *(_number(column, values[column]) for column in columns)] for method, values in rows.items()
    ]
    print_table(title, ["method", *(column.replace("_", " ") for column in columns)], cells)


def _number(column: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if column == "seconds" else f"{value:.3f}"


def _versions() -> dict[str, Any]:
    packages = {name: version(name) for name in ("torch", "numpy", "matplotlib")}
    return {"momentprop": __version__, "python": platform.python_version(), **packages}
