"""momentprop export: a converted network as a file for another runtime."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from torch import nn

from momentprop.cli.failure import reported
from momentprop.cli.inspect import show
from momentprop.cli.models import ModelError, build_model, is_saved, parse_example

Format = Literal["onnx", "pt2", "aoti"]
Tier = Literal["auto", "paper", "fast", "accurate"]
Outputs = Literal["moments", "classification", "regression"]


def export(
    model: Annotated[str, typer.Argument(help="package.module:factory, or a .pt2 file that mp.save wrote.")],
    format: Annotated[
        Format, typer.Option(help="ONNX, a torch.export archive, or a compiled package.")
    ] = "onnx",
    to: Annotated[Path | None, typer.Option(help="The file. Default: model.onnx or model.pt2 here.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Safetensors, or a state_dict that torch.load reads.")
    ] = None,
    example: Annotated[
        str,
        typer.Option(
            help="Shape of an input without the batch: 3,32,32. Several with ';', indices int64:12."
        ),
    ] = "",
    batch_dim: Annotated[
        list[int] | None,
        typer.Option(
            help="Where the inputs have the batch: 1 for [time, batch, ...]; or one for each input."
        ),
    ] = None,
    fidelity: Annotated[Tier, typer.Option(help="Tier of rules.")] = "auto",
    outputs: Annotated[Outputs, typer.Option(help="ONNX: what the file returns.")] = "moments",
    select: Annotated[
        str | None, typer.Option(help="ONNX: which of several outputs, by name or position.")
    ] = None,
    noise: Annotated[
        float | None, typer.Option(help="Regression: variance of the noise in the data.")
    ] = None,
    level: Annotated[float | None, typer.Option(help="Regression: of the interval. Default 0.95.")] = None,
    opset: Annotated[int | None, typer.Option(help="ONNX operator version. Default 20.")] = None,
    verify: Annotated[bool, typer.Option(help="ONNX: compare with PyTorch in ONNX Runtime.")] = True,
    note: Annotated[str, typer.Option(help="About this network; inspect shows it.")] = "",
    preprocessing: Annotated[str, typer.Option(help="What callers must do to their inputs.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Write a network that returns its uncertainty as a file: for ONNX Runtime, for torch, or compiled."""
    from momentprop.exports.archive import compile_package, save
    from momentprop.exports.onnx import export_onnx

    path = to or Path("model.onnx" if format == "onnx" else "model.pt2")
    texts: dict[str, Any] = {"note": note, "preprocessing": preprocessing}
    onnx_only = {"--outputs": outputs != "moments", "--select": select is not None}
    onnx_only |= {"--noise": noise is not None, "--level": level is not None}
    onnx_only |= {"--opset": opset is not None}
    with reported("export"):
        given = [name for name, is_given in onnx_only.items() if is_given]
        if given and format != "onnx":
            raise ValueError(f"{', '.join(given)} is for --format onnx")
        if outputs == "regression" and noise is None:
            raise ValueError("--outputs regression needs --noise, a variance that mp.fit_noise finds, or 0")
        network = _network(model, weights, example, batch_dim or [], fidelity)
        if format == "onnx":
            known = {"noise": noise, "level": level, "opset": opset}
            options = texts | {key: value for key, value in known.items() if value is not None}
            metadata = export_onnx(network, path, outputs, select=select, verify=verify, **options)
        else:
            metadata = (save if format == "pt2" else compile_package)(network, path, **texts)
        show(path, metadata, as_json)


def _network(
    model: str, weights: Path | None, example: str, batch_dim: list[int], fidelity: Tier
) -> nn.Module:
    from momentprop.convert import convert
    from momentprop.errors import FidelityNote
    from momentprop.exports.archive import load, read_description

    if is_saved(model):
        if weights is not None or example or batch_dim or fidelity != "auto":
            raise ModelError("a saved network has its weights, inputs and tier: leave out these options")
        if read_description(model).kind == "aoti":
            raise ModelError(f"{model} is machine code, which cannot be exported again")
        return load(model)
    if not example:
        raise ModelError("give the shape of an input without the batch, such as --example 3,32,32")
    dims = batch_dim if len(batch_dim) > 1 else (batch_dim or [0]) * (example.count(";") + 1)
    built, inputs = build_model(model, weights), parse_example(example, dims)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", FidelityNote)
        network = convert(built, inputs, fidelity, batch_dim=tuple(dims))
    for note in notes:
        Console(stderr=True).print(str(note.message), markup=False)
    return network
