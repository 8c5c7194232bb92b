"""The fidelity benchmark's tables on the terminal."""

from __future__ import annotations

import math
from itertools import chain, repeat
from typing import Any

from fidelity_evaluation import LIMIT
from rich.console import Console
from rich.table import Table

from momentprop.validation.equivalence import Samples

SHORT = {LIMIT: "Gaussian, MC's moments"}


def print_networks(console: Console, networks: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Distance from converged MC dropout", title_justify="left", pad_edge=False)
    for name in ("network", "method"):
        table.add_column(name, no_wrap=True)
    for name in ("std / MC's [5..95 %]", "std\ncorr.", "mean\nshift", "KL", "entropy\ncorr.", "T_eq"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, result in networks.items():
        labels = chain([name, f"{result['inputs']} inputs"], repeat(""))
        for method, row in result["rows"].items():
            table.add_row(next(labels), SHORT.get(method, method), *_cells(row))
        halves = f"MC, halves of {result['reference_samples']:,}"
        table.add_row("", halves, *_cells(result["halves_of_reference"]))
        table.add_section()
    console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    ratio = row.get("std_ratio")
    return [
        f"{ratio['median']:.3f} [{ratio['p05']:.2f}..{ratio['p95']:.2f}]" if ratio else "",
        _fixed(row.get("std_correlation"), 4),
        _fixed(row.get("mean_shift"), 3),
        _small(row["kl"]),
        _fixed(row.get("entropy_correlation"), 4),
        str(Samples(row["t_eq"], row["t_eq_bound"])) if "t_eq" in row and math.isfinite(row["kl"]) else "",
    ]


def print_pareto(console: Console, pareto: dict[str, Any]) -> None:
    title = f"pool_after_each, batch {pareto['batch']}: cost in units of one compiled plain pass"
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("outputs")
    table.add_column("method")
    for name in ("cost", "KL", "T_eq", "MC's cost at T_eq", "speed-up at equal fidelity"):
        table.add_column(name, justify="right")
    for key, result in pareto.items():
        if not key.startswith("K="):
            continue
        label = key.replace("=", " = ")
        for name, tier in result["tiers"].items():
            bound = tier["t_eq_bound"]
            worth = str(Samples(tier["t_eq"], bound))
            equal, speed_up = (f"{bound} {tier[k]:.1f}".strip() for k in ("mc_cost_at_t_eq", "speed_up"))
            table.add_row(label, name, f"{tier['cost']:.2f}", _small(tier["kl"]), worth, equal, speed_up)
            label = ""
        for size, mc in result["mc"].items():
            kl = "" if mc["kl"] is None else _small(mc["kl"])
            table.add_row("", f"MC, T = {size}", f"{mc['cost']:.2f}", kl, "", "", "")
        table.add_section()
    console.print(table)
    console.print(pareto["first_sample"])


def print_bars(console: Console, checks: dict[str, list[dict[str, Any]]]) -> None:
    table = Table(title="What tier accurate should reach", title_justify="left", pad_edge=False)
    for name in ("network", "measure", "bar", "measured", "met"):
        table.add_column(name)
    for name, lines in checks.items():
        label = name
        for line in lines:
            met = {True: "yes", False: "[bold red]NO[/]", None: "open"}[line["met"]]
            table.add_row(label, line["what"], line["bar"], line["measured"], met)
            label = ""
    console.print(table)


def _fixed(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _small(value: float) -> str:
    """Fixed point with two significant digits at least; scientific where that gets long."""
    if not math.isfinite(value):
        return "inf"
    return f"{value:.5f}" if 1e-4 <= value < 1000 else f"{value:.1e}"
