"""One of the paper's experiments from its settings to the record that the results page is made from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from momentprop_reproduction.running.executors import UnitProgress, all_units, records, run_units
from momentprop_reproduction.running.units import Job, Unit, Workspace, write_json


class Experiment(Protocol):
    """Names what a module such as `experiments.uci` offers.

    `Settings` is a frozen dataclass with `seed`, `root` (where the data lie) and `quick()`, a variant that
    takes at most two minutes. `summarize` gets the units' results by name and returns what the results page
    shows; `figures` gets them with the units' workspaces, and returns matplotlib figures by name.
    """

    Settings: Any

    def units(self, settings: Any) -> Sequence[Unit]: ...

    def summarize(self, results: Mapping[str, dict[str, Any]]) -> dict[str, Any]: ...

    def figures(
        self, results: Mapping[str, dict[str, Any]], workspaces: Mapping[str, Workspace]
    ) -> dict[str, Any]: ...


def reproduce(
    experiment: Any,
    name: str,
    settings: Any,
    out: Path,
    *,
    command: str,
    figures: Path | None = None,
    workers: int = 0,
    engine: str = "local",
    threads: int = 1,
    progress: UnitProgress | None = None,
) -> dict[str, Any]:
    """Run the units that are not finished, write `<out>/<name>.json` and the figures, return the record.

    Nothing in the record tells the machine but its number of cores, so it can be published as it is.
    """
    units, root = experiment.units(settings), out / "units"
    results = run_units(units, root, workers=workers, engine=engine, threads=threads, progress=progress)
    made = records(units, root)
    workspaces = {unit.name: Workspace(Job(unit, root).folder) for unit in all_units(units)}
    drawn = experiment.figures(results, workspaces)
    record = {
        "experiment": name,
        "command": command,
        "seed": settings.seed,
        "settings": _published(settings),
        "versions": _merged([unit["versions"] for unit in made]),
        "cores": os.cpu_count(),
        "threads": _merged([{"threads": unit["threads"]} for unit in made])["threads"],
        "unit_seconds": sum(unit["seconds"] for unit in made),
        "figures": [f"reproduce_{figure}.png" for figure in drawn],
        "summary": experiment.summarize(results),
    }
    folder = out if figures is None else figures
    folder.mkdir(parents=True, exist_ok=True)
    for figure, drawing in drawn.items():
        drawing.savefig(folder / f"reproduce_{figure}.png")
    write_json(out / f"{name}.json", record)
    return record


def _published(settings: Any) -> dict[str, Any]:
    """The settings without paths."""
    values = dataclasses.asdict(settings)
    return {
        name: value for name, value in values.items() if value is not None and not isinstance(value, Path)
    }


def _merged(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keep one value where all units agree, else all values: a run may be resumed with other versions."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in found for name in one):
        values = sorted({one[name] for one in found if name in one})
        merged[name] = values[0] if len(values) == 1 else " / ".join(map(str, values))
    return merged
