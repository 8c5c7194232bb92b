"""momentprop validate: does it agree with MC dropout on this model and this data?"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import nn

from momentprop.cli.failure import check_places
from momentprop.cli.models import ModelError, build_model, is_saved
from momentprop.cli.tables import print_table
from momentprop.errors import MissingRuleError, MomentpropError, TraceError
from momentprop.validation.page import failure_page
from momentprop.validation.report import Report


def validate(
    model: Annotated[
        str, typer.Argument(help="package.module:factory, or a .pt2 file that mp.save wrote with --original.")
    ],
    data: Annotated[Path, typer.Option(help=".npz (x, y), .parquet (x, y), or a folder of class folders.")],
    weights: Annotated[
        Path | None, typer.Option(help="Safetensors, or a state_dict that torch.load reads.")
    ] = None,
    original: Annotated[
        str | None,
        typer.Option(help="For a .pt2 file: package.module:factory of the network it was made of."),
    ] = None,
    machine_code: Annotated[
        bool,
        typer.Option("--machine-code", help="For a compiled .pt2 file: load it, since you trust its maker."),
    ] = False,
    ood: Annotated[Path | None, typer.Option(help="Novel inputs, in the same forms.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page here, report.html.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    samples: Annotated[int, typer.Option(help="Of MC dropout, for every input.")] = 1000,
    inputs: Annotated[int, typer.Option(help="At most so many, the first ones.")] = 500,
    task: Annotated[
        str | None, typer.Option(help="classification, regression or moments. Default: from y.")
    ] = None,
    tier: Annotated[list[str] | None, typer.Option(help="paper, fast, accurate. Default: all.")] = None,
    layers: Annotated[bool, typer.Option(help="Compare node by node too.")] = True,
    select: Annotated[str | None, typer.Option(help="Which of several outputs, by name or position.")] = None,
    batch_dim: Annotated[
        int, typer.Option(help="Where the model takes the batch: 1 for [time, batch, ...]. Files hold rows.")
    ] = 0,
    unsupported: Annotated[
        str, typer.Option(help="Operators without a rule: error, linearize or sample.")
    ] = "error",
    seed: Annotated[int, typer.Option(help="Fixes the masks.")] = 0,
    require_teq: Annotated[
        float | None,
        typer.Option(help="Status 1 unless the recommended tier is worth so many MC samples."),
    ] = None,
) -> None:
    """Compare every tier with MC dropout on your model and data. Ctrl-C: a report of what is done so far.

    Exit status: 0; 1 below --require-teq; 2 when something is wrong with the model, the data or an
    option; 130 after Ctrl-C.
    """
    errors = Console(stderr=True, soft_wrap=True)
    written = [path for path in (out, as_json) if path is not None]
    options: dict[str, Any] = {
        "tiers": tier or None,
        "select": select,
        "layers": layers,
    }
    options |= {"unsupported": unsupported, "seed": seed, "name": model, "batch_dim": batch_dim}
    with _failures(errors, model, out):
        _check(require_teq, samples, written)
        networks = _networks(model, weights, original, machine_code)
        report = _report(networks, data, ood, samples, inputs, task, options)
        if out is not None:
            report.save_html(out)
        if as_json is not None:
            as_json.write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False), encoding="utf-8")
    show(report)
    for path in written:
        errors.print(f"wrote {escape(str(path))}")
    if report.partial:
        raise typer.Exit(130)
    if require_teq is not None and not report.t_eq().is_at_least(require_teq):
        errors.print(f"[red]worth {report.t_eq()} MC samples, below the required {require_teq:g}[/red]")
        raise typer.Exit(1)


@contextmanager
def _failures(errors: Console, model: str, page: Path | None) -> Iterator[None]:
    """Turn what goes wrong into a message and a status; the page says why a model cannot be converted."""

    def failed(why: object) -> typer.Exit:
        errors.print(f"[red]momentprop validate failed:[/red] {escape(str(why))}")
        return typer.Exit(2)

    try:
        yield
    except KeyboardInterrupt:
        errors.print("[red]momentprop validate was interrupted[/red] before there was anything to report")
        raise typer.Exit(130) from None
    except (MissingRuleError, TraceError) as error:
        if page is not None:
            page.write_text(failure_page(model, error), encoding="utf-8")
        raise failed(error) from None
    except (MomentpropError, OSError, ValueError, TypeError) as error:
        raise failed(error) from None
    except Exception as error:  # status 1 is for the worth alone
        errors.print_exception()
        raise failed(f"{type(error).__name__}, which is unexpected: {error}") from None


def _check(require_teq: float | None, samples: int, written: list[Path]) -> None:
    """Check the user's choices before the long part, not after it."""
    if require_teq is not None and require_teq > samples / 2:
        raise ValueError(
            f"--require-teq {require_teq:g} cannot be shown with {samples} samples: give at least "
            f"--samples {2 * require_teq:g}"
        )
    check_places(*written)


def _networks(
    name: str, weights: Path | None, original: str | None, machine_code: bool
) -> tuple[nn.Module, nn.Module | None]:
    """Return the network with dropout, and the saved one, if that is what the name means."""
    from momentprop.exports.archive import load

    if not is_saved(name):
        return build_model(name, weights), None
    if original is None:
        raise ModelError(
            f"{name} holds the converted network, whose dropouts are gone: name the network it was made of "
            "with --original package.module:factory, to be sampled"
        )
    saved = load(name, machine_code=machine_code)
    return build_model(original, weights), saved


def _report(
    networks: tuple[nn.Module, nn.Module | None],
    data: Path,
    ood: Path | None,
    samples: int,
    inputs: int,
    task: str | None,
    options: dict[str, Any],
) -> Report:
    from momentprop.cli.datasets import read_batches
    from momentprop.validation.validate import validate as run

    dim = options["batch_dim"]
    batches, has_targets = read_batches(data, inputs, task != "moments", dim)
    novel = None if ood is None else read_batches(ood, inputs, False, dim)[0]
    if task in ("classification", "regression") and not has_targets:
        raise ValueError(f"{data} has no targets y, which --task {task} is about")
    model, saved = networks
    with _progress() as tell, warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        report = run(
            model,
            batches,
            samples,
            novel,
            has_targets,
            task=task,
            n_inputs=inputs,
            saved=saved,
            progress=tell,
            **options,
        )
    for text in dict.fromkeys(str(note.message) for note in notes):
        Console(stderr=True).print(text, markup=False)
    return report


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, with the time that remains."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for other in tasks.values():
                    bar.remove_task(other)
                tasks.clear()
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total if total > 1 else None)

        yield tell


def show(report: Report) -> None:
    """The summary on stdout."""
    console = Console()
    console.print(report.heading, markup=False, style="bold")
    for table in report.tables():
        print_table(table.title, table.header, table.text)
    for remark in report.remarks:
        console.print(remark, markup=False)
    console.print(str(report.verdict), markup=False, style="bold", highlight=False)
