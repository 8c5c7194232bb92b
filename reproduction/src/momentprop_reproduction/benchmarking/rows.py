"""Holds what was measured: rows, and all that is needed to read them again."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from momentprop.version import __version__
from momentprop_reproduction.benchmarking.turns import Times

SCHEMA = 1
_PACKAGES = ("torch", "onnxruntime", "onnx", "numpy")
_LEAST_MEMORY = 2**20  # bytes of the plain network, from which on a ratio says something


@dataclass
class Row:
    """One method in one runtime, for one batch size and number of threads.

    Ratios are to the plain network in the same runtime, with the same batch and threads, measured in turns
    with it. `limit` is the ratio of multiply-adds. `error` says why there is no measurement.
    """

    threads: int
    runtime: str
    batch: int
    method: str
    limit: float | None = None
    calls: int = 0
    median_seconds: float | None = None
    p99_seconds: float | None = None
    inputs_per_second: float | None = None
    median_ratio: float | None = None
    p99_ratio: float | None = None
    peak_bytes: int | None = None
    peak_ratio: float | None = None
    error: str | None = None

    def measured(self, times: Times, plain: Times | None) -> None:
        self.calls = len(times.seconds)
        self.median_seconds, self.p99_seconds = times.median, times.p99
        self.inputs_per_second = self.batch / times.median
        if plain is not None:
            self.median_ratio = times.median / plain.median
            self.p99_ratio = times.p99 / plain.p99


@dataclass
class Result:
    """Holds the rows of a run, and how it was made."""

    model: str
    inputs: list[str]
    settings: dict[str, Any]
    multiply_adds: dict[str, float | None] = field(default_factory=dict)  # for one input, by method
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    machine: dict[str, Any] = field(default_factory=lambda: machine())

    def of(self, **wanted: Any) -> list[Row]:
        """The rows with these values: of(runtime="compiled", batch=1)."""
        return [row for row in self.rows if all(getattr(row, k) == v for k, v in wanted.items())]

    def add_memory(self, threads: int, runtime: str, method: str, peaks: dict[int, int]) -> None:
        for row in self.of(threads=threads, runtime=runtime, method=method):
            row.peak_bytes = peaks.get(row.batch)
        for row in self.of(threads=threads, runtime=runtime):
            plain = self.of(threads=threads, runtime=runtime, batch=row.batch, method="plain")
            base = plain[0].peak_bytes if plain else None
            if row.peak_bytes is not None and base is not None and base >= _LEAST_MEMORY:
                row.peak_ratio = row.peak_bytes / base

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA} | asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        if data.get("schema") != SCHEMA:
            raise ValueError(f"a result of schema {data.get('schema')!r}, and {SCHEMA} is known here")
        fields = {key: value for key, value in data.items() if key != "schema"}
        return cls(**fields | {"rows": [Row(**row) for row in data["rows"]]})


def machine() -> dict[str, Any]:
    """Return what times depend on: processor, cores, system and versions."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "momentprop": __version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if hasattr(os, "getloadavg"):
        found["load_at_start"] = round(os.getloadavg()[0], 2)
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
