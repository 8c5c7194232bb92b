"""momentprop bench: what uncertainty costs, in passes of the plain network."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from momentprop.cli.failure import check_places, reported
from momentprop.cli.models import ModelError, build_model, is_saved, parse_example
from momentprop_reproduction.benchmarking.methods import MC, PLAIN, SAVED, TIERS, choose
from momentprop_reproduction.benchmarking.rows import Result, Row
from momentprop_reproduction.benchmarking.run import Plan, run, start
from momentprop_reproduction.benchmarking.runtimes import RUNTIMES
from momentprop_reproduction.benchmarking.subject import Subject, paper_subject
from momentprop_reproduction.cli.unit_progress import UnitBars

FORMATS = (".png", ".svg", ".pdf")


def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="package.module:factory, or a .pt2 file. Default: the paper's CNN, 10 classes."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Safetensors, or a state_dict that torch.load reads.")
    ] = None,
    input_shape: Annotated[
        str,
        typer.Option(help="Of an input without the batch: 3,32,32. Several with ';', indices int64:12."),
    ] = "",
    original: Annotated[
        str | None,
        typer.Option(help="For a .pt2 file: package.module:factory of the network it was made of."),
    ] = None,
    machine_code: Annotated[
        bool,
        typer.Option("--machine-code", help="For a compiled .pt2 file: load it, since you trust its maker."),
    ] = False,
    batch: Annotated[list[int] | None, typer.Option(help="Sizes. Default: 1, 8, 32, 256.")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="Numbers. Default: 1, 2.")] = None,
    runtime: Annotated[
        list[str] | None, typer.Option(help="eager, compiled, aot, onnx. Default: all.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="mc, paper, fast, accurate. Default: all; plain is always there.")
    ] = None,
    samples: Annotated[list[int] | None, typer.Option(help="Of MC dropout. Default: 10, 50.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="For each runtime, batch and number of threads. Default: 10.")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too, in processes of its own.")] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="Eager and ONNX, one thread, batch 1 and 8, one second each.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write all figures here, as JSON.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw a figure here: .png, .svg or .pdf.")] = None,
) -> None:
    """Measure latency, throughput and memory of MC dropout and every tier, over the plain network's."""
    errors = Console(stderr=True, soft_wrap=True)
    with reported("bench"):
        if figure is not None:
            from momentprop import plots  # noqa: F401  (to hear at once that matplotlib is missing)
            from momentprop_reproduction.benchmarking.figure import draw

            if figure.suffix not in FORMATS:
                raise ValueError(f"--figure must end in {', '.join(FORMATS)}, not {figure.name}")
        check_places(out, figure)
        if seconds is not None and seconds <= 0:
            raise ValueError("--seconds must be above 0")
        kinds = method or ([SAVED] if model is not None and is_saved(model) else [MC, *TIERS])
        plan = Plan(
            tuple(choose(kinds, samples or ([10] if quick else [10, 50]))),
            tuple(batch or ([1, 8] if quick else [1, 8, 32, 256])),
            tuple(threads or ([1] if quick else [1, 2])),
            tuple(runtime or (["eager", "onnx"] if quick else RUNTIMES)),
            seconds or (1.0 if quick else 10.0),
            least_rounds=2 if quick else 5,
            memory=memory,
        )
        build = functools.partial(build_subject, model, weights, input_shape, original, machine_code)
        result = start(build(), plan)
        try:
            with UnitBars("bench", plan.units()) as bars:
                run(build, plan, bars, result)
        except KeyboardInterrupt:
            errors.print("[red]momentprop bench was interrupted[/red]: this is what it had measured")
        show(result)  # before files are written, which may fail
        if out is not None:
            out.write_text(json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        if figure is not None and result.rows:
            draw(result, figure)
    for path in (out, figure):
        if path is not None and path.exists():
            errors.print(f"wrote {escape(str(path))}")
    if not result.complete:
        raise typer.Exit(130)


def build_subject(
    model: str | None,
    weights: Path | None,
    input_shape: str,
    original: str | None,
    machine_code: bool = False,
) -> Subject:
    """The network that the command line names; called again in every process that measures memory."""
    if model is None:
        if weights is not None or input_shape or original is not None:
            raise ModelError("these options are about a model of yours: name it")
        return paper_subject()
    if not is_saved(model):
        if not input_shape:
            raise ModelError("give the shape of an input without the batch, such as --input-shape 3,32,32")
        return Subject(model, parse_example(input_shape), build_model(model, weights))
    from momentprop.exports.archive import load
    from momentprop.exports.loaded import LoadedNetwork
    from momentprop.lowering.lower import device_of

    saved: LoadedNetwork = load(model, machine_code=machine_code)
    if any(saved.uncertain):
        raise ModelError("a network with uncertain inputs cannot be measured from its file")
    inputs = tuple(saved.signature.tensors(saved.uncertain, device_of(saved), batch=2))
    return Subject(model, inputs, None if original is None else build_model(original, weights), saved)


def show(result: Result) -> None:
    """Tables on stdout, one for each runtime and number of threads."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(f"{result.model}: {', '.join(result.inputs)}", markup=False, style="bold", highlight=False)
    console.print(
        ", ".join(f"{key} {value}" for key, value in result.machine.items()), markup=False, highlight=False
    )
    for place in dict.fromkeys((row.threads, row.runtime) for row in result.rows):
        threads, runtime = place
        title = f"{runtime}, {threads} thread{'s' * (threads > 1)}: in units of the plain network's"
        table = Table(title=title, title_justify="left", padding=(0, 0))
        table.add_column("batch", justify="right")
        table.add_column("method", no_wrap=True)
        for column in ("median", "p99", "multiply-adds", "inputs/s", "peak memory"):
            table.add_column(column, justify="right")
        for row in result.of(threads=threads, runtime=runtime):
            table.add_row(*map(escape, _cells(row)), end_section=False)
        console.print(table)
    for note in result.notes:
        console.print(note, markup=False)


def _cells(row: Row) -> list[str]:
    if row.error is not None:
        return [str(row.batch), row.method, f"not measured: {row.error}", "", "", "", ""]
    absolute = row.method == PLAIN or row.median_ratio is None
    times = (
        [_seconds(row.median_seconds), _seconds(row.p99_seconds)]
        if absolute
        else [_ratio(row.median_ratio), _ratio(row.p99_ratio)]
    )
    peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f} MiB"
    if row.peak_ratio is not None and row.method != PLAIN:
        peak += f" ({row.peak_ratio:.2f})"
    speed = "-" if row.inputs_per_second is None else f"{row.inputs_per_second:,.0f}"
    return [str(row.batch), row.method, *times, _ratio(row.limit), speed, peak]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.3g} ms"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
