"""The report: findings printed as text, JSON or a page."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from momentprop.predict.records import plain
from momentprop.validation import tables
from momentprop.validation.findings import Findings
from momentprop.validation.page import page
from momentprop.validation.tables import Table
from momentprop.validation.verdict import GRADES

_MOST_LAYERS = 5
_LAYER_COLUMNS = ("where", "short_operator", "std_ratio", "mean_shift", "introduced")


@dataclass(frozen=True)
class Report(Findings):
    """Presents what `mp.validate` found: `print(report)`, `report.to_dict()`, `report.save_html(path)`."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON: infinity as "inf", NaN as null."""
        found: dict[str, Any] = plain(dataclasses.asdict(self))
        found["thresholds"] = {name: dataclasses.asdict(limits) for name, limits in GRADES.items()}
        return found

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page: one file that loads nothing from elsewhere."""
        path = Path(path)
        path.write_text(page(self), encoding="utf-8")
        return path

    def __str__(self) -> str:
        lines = [self.heading, ""]
        for table in self.tables():
            lines += [table.title, *_aligned([table.header, *table.text]), ""]
        return "\n".join([*lines, *self.remarks, str(self.verdict)])

    @property
    def heading(self) -> str:
        ood = f", {self.n_ood} novel inputs" if self.n_ood else ""
        part = "PARTIAL, interrupted: " if self.partial else ""
        return f"{part}{self.model}: {self.task}, {self.n_inputs} inputs{ood}, {self.n_samples} MC samples"

    @property
    def remarks(self) -> list[str]:
        """Say how well the truth is known, and which tiers are missing and why."""
        missing = [f"Tier {tier} is missing: {why.splitlines()[0]}" for tier, why in self.missing.items()]
        return [f"{self.sampling_error}.", *missing]

    def tables(self) -> list[Table]:
        """Return the tables of the summary; layers are those of the recommended tier, if it has any."""
        found = [tables.agreement(self), tables.quality(self), tables.cost(self)]
        layers = tables.worst_layers(self, _MOST_LAYERS, _LAYER_COLUMNS)
        chosen = self.verdict.recommendation
        found += [layers[chosen]] if chosen in layers else layers.values()
        return [table for table in found if table.rows]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
