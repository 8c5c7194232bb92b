"""Holds what a file says about the network in it, as JSON: version, tier, names and shapes, notes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch

from momentprop.errors import ArchiveError, ExportError
from momentprop.exports.interface import Call, Port
from momentprop.exports.outline import Outline
from momentprop.exports.program import Program
from momentprop.predict.records import plain
from momentprop.version import __version__

LAYOUT = 1  # raised when files become unreadable for older versions
MEMBER = "extra/momentprop.json"


@dataclass(frozen=True)
class Metadata:
    """Holds a file's own account of itself."""

    kind: str  # "pt2", "aoti" or "onnx"
    fidelity: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    note: str = ""
    preprocessing: str = ""  # what callers must do to their inputs first
    report: Any = None  # how close it is to sampling, as its maker measured it
    summary: str = ""  # operators, and how many are approximate
    device: str = "cpu"
    call: Outline = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    structure: Outline | None = None  # of the outputs; None where they are a plain list
    options: Mapping[str, Any] = field(default_factory=dict)  # opset, interval and the like
    sha256: Mapping[str, str] = field(default_factory=dict)  # of every other member of the file
    momentprop: str = __version__
    torch: str = str(torch.__version__)
    layout: int = LAYOUT

    @classmethod
    def of(cls, kind: str, program: Program, **more: Any) -> Self:
        call = program.call
        return cls(
            kind,
            program.fidelity,
            call.inputs,
            program.outputs,
            call=call.tree,
            positional=call.positional,
            **more,
        )

    def as_call(self) -> Call:
        return Call(self.inputs, self.call, self.positional)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        ports = {name: [port.to_dict() for port in data[name]] for name in ("inputs", "outputs")}
        return data | ports | {"positional": list(self.positional)}

    def to_json(self) -> str:
        try:
            return json.dumps(self.to_dict(), indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ExportError(f"note, preprocessing and report must be plain JSON values: {error}") from None

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        try:
            data = json.loads(text)
            if data["layout"] > LAYOUT:
                raise ArchiveError(
                    f"the file is in a layout of momentprop {data['momentprop']}; upgrade to read it"
                )
            known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
            for name in ("inputs", "outputs"):
                known[name] = tuple(Port.from_dict(port) for port in data[name])
            return cls(**known | {"positional": tuple(data["positional"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArchiveError(f"the description inside the file cannot be read: {error!r}") from None


def as_report(report: Any) -> Any:
    """A report as JSON values: what its `to_dict` gives, a dictionary, or text."""
    return plain(report.to_dict() if hasattr(report, "to_dict") else report)
