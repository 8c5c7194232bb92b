"""The unit of work: one UCI set, one training of a CIFAR network. It runs anywhere and resumes.

A unit has a folder of its own, named after the unit and its settings, so that nothing made with other
settings is ever picked up. There it keeps checkpoints while it runs (`Workspace.save`), and its result,
`result.json`, at the end. Every file is written whole or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import safetensors.torch as safetensors
from torch import Tensor

from momentprop_reproduction.running.timing import torch_threads
from momentprop_reproduction.running.training import seeded
from momentprop_reproduction.running.versions import versions

Report = Callable[[float, float, str], None]
"""Called as report(done, total, label)."""


@dataclass(frozen=True)
class Unit:
    """Work that gives one JSON-able dict.

    Args:
        name: unique within a run; letters, digits, "-", "_" and ".".
        run: functools.partial of a function at the top of a module (so that another process can import it),
            called with the `Workspace`. What is bound in it are the unit's settings: numbers, strings,
            dataclasses and containers of them. A `Path` says where something lies and is no setting.
        needs: units whose files this one reads; they finish before it starts.
        work: how long it takes, in any one unit of time for all units of a run; for the remaining time.
        revision: raised when finished units are to run again, in their old folders: checkpoints stay, and
            it is up to `run` which of them it takes.
    """

    name: str
    run: Callable[[Workspace], dict[str, Any]]
    needs: tuple[Unit, ...] = ()
    work: float = 1.0
    revision: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the result depends on: arguments bound in `run`, and those left at their defaults."""
        call = self.run if isinstance(self.run, partial) else partial(self.run)
        # the first parameter left open takes the workspace
        bound = inspect.signature(call.func).bind_partial(*call.args, **call.keywords)
        bound.apply_defaults()
        return {
            name: plain for name, value in bound.arguments.items() if (plain := _plain(value)) is not None
        }

    @property
    def digest(self) -> str:
        """Hash the settings, and those of the units it needs."""
        text = json.dumps([self.settings, [need.digest for need in self.needs]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.digest}"


@dataclass(frozen=True)
class Workspace:
    """Gives a running unit its folder, a place to say how far it is, and checkpoints.

    `needs` are the folders of the units that the running one needs, by name.
    """

    folder: Path
    needs: Mapping[str, Path] = field(default_factory=dict)
    reporter: Report | None = None

    def report(self, done: float, total: float, label: str = "") -> None:
        """Say that `done` of `total` is done, counted in whatever takes even time."""
        if self.reporter is not None:
            self.reporter(done, total, label)

    def of(self, name: str) -> Workspace:
        """The workspace of a unit this one needs, to read from."""
        return Workspace(self.needs[name])

    def save(self, name: str, tensors: Mapping[str, Tensor], **meta: Any) -> None:
        """Write a checkpoint; `meta` is JSON-able and comes back by `load_meta`."""
        saved = {key: tensor.detach().contiguous().clone() for key, tensor in tensors.items()}
        data = safetensors.save(saved, {"meta": json.dumps(meta)})
        write_bytes(self._file(name), data)

    def load(self, name: str) -> dict[str, Tensor] | None:
        """The tensors of a checkpoint, or None if there is none."""
        file = self._file(name)
        if not file.exists():
            return None
        tensors: dict[str, Tensor] = safetensors.load(file.read_bytes())
        return tensors

    def load_meta(self, name: str) -> dict[str, Any]:
        """Read what was saved beside the tensors."""
        data = self._file(name).read_bytes()
        # the file's head: its own length in eight bytes, then JSON
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        meta: dict[str, Any] = json.loads(head["__metadata__"]["meta"])
        return meta

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


@dataclass(frozen=True)
class Job:
    """A unit with its place on disk: what an executor gets."""

    unit: Unit
    root: Path
    threads: int = 1

    @cached_property
    def folder(self) -> Path:
        return self.root / self.unit.folder_name

    @property
    def result_file(self) -> Path:
        return self.folder / "result.json"

    def record(self) -> dict[str, Any] | None:
        """Read what an earlier run of this revision wrote: name, settings, versions, seconds, result."""
        if not self.result_file.exists():
            return None
        record: dict[str, Any] = json.loads(self.result_file.read_text(encoding="utf-8"))
        return record if record.get("revision", 0) == self.unit.revision else None

    def perform(self, reporter: Report | None = None) -> None:
        """Run the unit in this process and write its record.

        The number of threads and the random state are set first, so that the result does not depend on what
        else the process did.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        needs = {unit.name: self.root / unit.folder_name for unit in self.unit.needs}
        start = time.perf_counter()
        with torch_threads(self.threads), seeded(int(self.unit.digest, 16)):
            result = self.unit.run(Workspace(self.folder, needs, reporter))
        record = {
            "name": self.unit.name,
            "settings": self.unit.settings,
            "revision": self.unit.revision,
            "versions": versions(),
            "threads": self.threads,
            "seconds": time.perf_counter() - start,
            "result": result,
        }
        write_json(self.result_file, record)


def write_json(file: Path, value: Any) -> None:
    """Write JSON whole or not at all; NaN and infinity are no JSON and give a ValueError."""
    write_bytes(file, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def write_bytes(file: Path, data: bytes) -> None:
    """Write whole or not at all: to a file beside it, then renamed."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """Write a value as JSON knows it. None and paths, which say where and not what, become None."""
    if value is None or isinstance(value, Path):
        return None
    if isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain for k, v in value.items() if (plain := _plain(v)) is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    raise TypeError(f"a unit's settings must be JSON-able; {value!r} is a {type(value).__name__}")
