"""Tables of a report as values, which text, the terminal and the page write in their own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from momentprop.validation.findings import AGREEMENT, LABELS, MC, QUALITY, Findings, shown

_LAYERS = ("where", "short_operator", "depth", "std_ratio", "std_correlation", "mean_shift", "introduced")


@dataclass(frozen=True)
class Table:
    """Holds the names of columns and rows of values: numbers, estimates, worths, names."""

    title: str
    header: list[str]
    rows: list[list[Any]]
    hints: Sequence[str] = ()  # more about each row

    @staticmethod
    def of(title: str, records: Sequence[Any], names: Sequence[str], hints: Sequence[str] = ()) -> Table:
        """Make a table of these attributes of records."""
        rows = [[getattr(record, name) for name in names] for record in records]
        return Table(title, [LABELS[name] for name in names], rows, hints)

    @property
    def text(self) -> list[list[str]]:
        """Return the rows as they are printed."""
        return [[shown(value) for value in row] for row in self.rows]


def agreement(report: Findings) -> Table:
    """Compare the methods with MC dropout."""
    return _figures(report, "Agreement with MC dropout", AGREEMENT, [m for m in report.figures if m != MC])


def quality(report: Findings, names: Sequence[str] = QUALITY) -> Table:
    """Compare the methods with the targets."""
    return _figures(report, "Against the targets", names, list(report.figures))


def _figures(report: Findings, title: str, names: Sequence[str], methods: list[str]) -> Table:
    """List the figures that any method has, for all methods that have any."""
    found: dict[str, dict[str, Any]] = {method: dict(report.figures[method]) for method in methods}
    for method in report.worths:
        found[method]["t_eq"] = report.worths[method]
    used = [name for name in names if any(name in figures for figures in found.values())]
    rows = [[m, *[f.get(n) for n in used]] for m, f in found.items() if any(n in f for n in used)]
    return Table(title, ["method", *[LABELS[name] for name in used]], rows)


def cost(report: Findings) -> Table:
    """List what each method takes, in plain passes."""
    header = ["batch", "plain, ms", *(report.latency[0].ratios if report.latency else ())]
    rows: list[list[Any]] = [
        [r.batch, f"{1e3 * r.plain_seconds:.2f}", *[f"{v:.1f}" for v in r.ratios.values()]]
        for r in report.latency
    ]
    return Table("Cost in plain passes", header, rows)


def worst_layers(report: Findings, most: int, names: Sequence[str] = _LAYERS) -> dict[str, Table]:
    """List the nodes of each tier that introduce most, the recommended tier first."""
    found = {}
    for tier, rows in recommended_first(report, report.layers).items():
        worst = sorted(rows, key=lambda row: -row.introduced)[:most]
        hints = [f"{row.operator} {row.source}" for row in worst]
        found[tier] = Table.of(f"Where tier {tier} loses most (forward sweep)", worst, names, hints)
    return found


def recommended_first(report: Findings, by_tier: dict[str, Any]) -> dict[str, Any]:
    """Sort what there is of each tier: the recommended tier comes first."""
    return dict(sorted(by_tier.items(), key=lambda item: item[0] != report.verdict.recommendation))
