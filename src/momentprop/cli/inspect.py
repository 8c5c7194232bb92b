"""momentprop inspect: what a file says about the network in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from momentprop.cli.failure import reported
from momentprop.cli.tables import print_table
from momentprop.exports.interface import Port
from momentprop.exports.metadata import Metadata

_KINDS = {"pt2": "torch.export archive", "aoti": "compiled package (AOTInductor)", "onnx": "ONNX"}


def inspect(
    path: Annotated[Path, typer.Argument(help="A .pt2 or .onnx file that momentprop wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print what a file says about itself: tier, inputs, outputs, notes. Nothing in it runs."""
    from momentprop.exports.inspection import inspect as read

    with reported("inspect"):
        show(path, read(path), as_json)


def show(path: Path, metadata: Metadata, as_json: bool) -> None:
    """The description of a file as a table, or as JSON."""
    size = path.stat().st_size
    if as_json:
        print(json.dumps({"file": str(path), "bytes": size} | metadata.to_dict(), indent=2))
        return
    print_table("", (), _rows(path, size, metadata), names=2)


def _rows(path: Path, size: int, metadata: Metadata) -> list[tuple[str, str]]:
    rows = [
        ("file", f"{path}, {size / 1e6:.2f} MB"),
        ("kind", _KINDS.get(metadata.kind, metadata.kind)),
        ("fidelity", metadata.fidelity),
        ("operators", metadata.summary),
        *(("input", _port(port)) for port in metadata.inputs),
        *(("output", _port(port)) for port in metadata.outputs),
        ("preprocessing", metadata.preprocessing),
        ("note", metadata.note),
        *((f"report: {key}", value) for key, value in _report(metadata.report)),
        *((key, _text(value)) for key, value in metadata.options.items()),
        ("device", metadata.device),
        ("written by", f"momentprop {metadata.momentprop}, torch {metadata.torch}"),
    ]
    return [(title, text) for title, text in rows if text]


def _port(port: Port) -> str:
    shape = f"{port.name}: {port.dtype}[{', '.join(map(str, port.shape))}]"
    return f"{shape}, uncertain (with {port.name}_variance)" if port.uncertain else shape


def _report(report: Any) -> list[tuple[str, str]]:
    if report is None:
        return []
    return (
        [(key, _text(value)) for key, value in report.items()]
        if isinstance(report, dict)
        else [("", _text(report))]
    )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(entry)}" for key, entry in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
