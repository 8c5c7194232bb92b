"""The charts of the page as plain data: series of x and y, names and axes."""

from __future__ import annotations

from typing import Any

from momentprop import tiers
from momentprop.validation.findings import MC, PLAIN, SAVED, Findings
from momentprop.validation.layers import LayerRow

_METHODS = (PLAIN, MC, *(tier.name for tier in tiers.ALL), SAVED)
_COLOURS = {method: number for number, method in enumerate(_METHODS)}
_OTHER = len(_COLOURS) - 1
_GRID = [i / 100 for i in range(101)]

Chart = dict[str, Any]


def charts(report: Findings) -> dict[str, Chart]:
    """Return every chart there are numbers for, by the name of its place in the page."""
    found = {
        "convergence": _convergence(report),
        "std": _scatter(report),
        "reliability": _curves(
            report, "reliability", "confidence", "accuracy", "confidence", "accuracy", diagonal=True
        ),
        "selective": _curves(
            report, "selective", "coverage", "accuracy", "share of inputs answered", "accuracy among them"
        ),
        "coverage": _curves(report, "coverage", "level", "covered", "promised", "covered", diagonal=True),
        "roc": _roc(report),
    }
    for tier, rows in report.layers.items():
        found[f"layers-{tier}"] = _depth(rows)
    return {name: chart for name, chart in found.items() if chart["series"]}


def _convergence(report: Findings) -> Chart:
    sizes = sorted(report.convergence)
    series = []
    if sizes:
        values = [_positive(report.convergence[s]) for s in sizes]
        series.append(_line("MC dropout, T samples", sizes, values, MC))
        for tier in report.worths:
            kl = _positive(report.figures[tier].get("kl"))
            series.append(_line(tier, sizes, [kl] * len(sizes), tier) | {"dash": True})
    return {
        "x": "samples of MC dropout",
        "y": "divergence from all samples",
        "log": True,
        "shared": True,
        "series": series,
    }


def _scatter(report: Findings) -> Chart:
    if MC not in report.scatter:
        return {"series": []}
    order = sorted(range(len(report.scatter[MC])), key=lambda i: report.scatter[MC][i])
    x = [report.scatter[MC][i] for i in order]
    series = [
        _line(tier, x, [values[i] for i in order], tier) | {"dots": True}
        for tier, values in report.scatter.items()
        if tier != MC
    ]
    series.append(_line("equal", x, x, PLAIN) | {"dash": True})
    return {"x": "std of MC dropout", "y": "std of the tier", "shared": True, "series": series}


def _curves(
    report: Findings, name: str, x: str, y: str, x_label: str, y_label: str, diagonal: bool = False
) -> Chart:
    series = [
        _line(method, curves[name][x], curves[name][y], method)
        for method, curves in report.curves.items()
        if name in curves
    ]
    if series and diagonal:
        series.append(_line("ideal", [0.0, 1.0], [0.0, 1.0], PLAIN) | {"dash": True})
    return {"x": x_label, "y": y_label, "series": series}


def _roc(report: Findings) -> Chart:
    """Make the chart of the ROC curves, at one grid of false positive rates for all methods."""
    series = []
    for method, curves in report.curves.items():
        if "roc" in curves:
            points = list(zip(curves["roc"]["false"], curves["roc"]["true"], strict=True))
            reached = [max(t for f, t in points if f <= x) for x in _GRID]
            series.append(_line(method, _GRID, reached, method))
    if series:
        series.append(_line("chance", _GRID, _GRID, PLAIN) | {"dash": True})
    return {"x": "known inputs flagged", "y": "novel inputs found", "shared": True, "series": series}


def _depth(rows: list[LayerRow]) -> Chart:
    x = [row.depth for row in rows]
    return {
        "x": "depth",
        "whole": True,
        "y": "ratio; shift in std",
        "shared": True,
        "names": [f"{row.where}  {row.short_operator}" for row in rows],
        "series": [
            {"name": "std / MC std", "x": x, "y": [row.std_ratio for row in rows], "colour": 4},
            {"name": "std correlation", "x": x, "y": [row.std_correlation for row in rows], "colour": 3},
            {"name": "mean shift", "x": x, "y": [row.mean_shift for row in rows], "colour": 1},
        ],
    }


def _line(name: str, x: list[Any], y: list[Any], method: str) -> dict[str, Any]:
    return {"name": name, "x": x, "y": y, "colour": _COLOURS.get(method, _OTHER)}


def _positive(value: Any) -> float | None:
    """Return the value as a number for a logarithmic axis; None unless it is positive and finite."""
    number = float(value) if isinstance(value, (int, float)) else 0.0
    return number if 0 < number < float("inf") else None
