"""The report: findings printed as text, JSON or a page."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from momentprop.predict.records import plain
from momentprop.validation.findings import AGREEMENT, LABELS, MC, QUALITY, Findings, shown
from momentprop.validation.page import page
from momentprop.validation.verdict import GRADES


@dataclass(frozen=True)
class Report(Findings):
    """Presents what `mp.validate` found: `print(report)`, `report.to_dict()`, `report.save_html(path)`."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON: infinity as "inf", NaN as null."""
        found: dict[str, Any] = _plain(dataclasses.asdict(self))
        found["thresholds"] = {name: dataclasses.asdict(limits) for name, limits in GRADES.items()}
        return found

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page: one file that loads nothing from elsewhere."""
        path = Path(path)
        path.write_text(page(self), encoding="utf-8")
        return path

    def __str__(self) -> str:
        lines = [self.heading, ""]
        for title, header, rows in self.tables():
            lines += [title, *_aligned([header, *rows]), ""]
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

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """(title, header, rows) of the summary, as text."""
        made = []
        for title, names in (("Agreement with MC dropout", AGREEMENT), ("Against the targets", QUALITY)):
            used = [
                n
                for n in names
                if any(n in f or (n == "t_eq" and self.worths) for f in self.figures.values())
            ]
            methods = [m for m, f in self.figures.items() if any(n in f for n in used)]
            if names is AGREEMENT:
                methods = [m for m in methods if m != MC]
            if used:
                rows = [[m, *[self._cell(m, n) for n in used]] for m in methods]
                made.append((title, ["method", *[LABELS[n] for n in used]], rows))
        if self.latency:
            header = ["batch", "plain, ms", *self.latency[0].ratios]
            rows = [
                [str(r.batch), f"{1e3 * r.plain_seconds:.2f}", *[f"{v:.1f}" for v in r.ratios.values()]]
                for r in self.latency
            ]
            made.append(("Cost in plain passes", header, rows))
        for tier, layer_rows in self.layers.items():
            worst = sorted(layer_rows, key=lambda r: -r.introduced)[:5]
            rows = [
                [
                    r.module or "(model)",
                    r.short_operator,
                    f"{r.std_ratio:.3f}",
                    f"{r.mean_shift:.3f}",
                    f"{r.introduced:+.3f}",
                ]
                for r in worst
            ]
            header = ["module", "operator", "std / MC std", "mean shift", "error introduced"]
            if rows and tier == (
                self.verdict.recommendation if self.verdict.recommendation in self.layers else tier
            ):
                made.append((f"Where tier {tier} loses most (forward sweep)", header, rows))
        return made

    def _cell(self, method: str, name: str) -> str:
        if name == "t_eq":
            return str(self.worths[method]) if method in self.worths else "-"
        return shown(self.figures[method].get(name))


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return plain(value)
