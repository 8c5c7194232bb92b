"""The fidelity benchmark's figure: cost against divergence, and std ratios of all networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fidelity_evaluation import TIERS
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from momentprop.plots import COLORS

STYLE = {"paper": (COLORS[1], "s"), "fast": (COLORS[5], "^"), "accurate": (COLORS[2], "o")}
FONT = 8  # points, at the width of a page
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def draw(networks: dict[str, Any], pareto: dict[str, Any] | None, path: Path) -> None:
    ratio_height = 0.8 + 0.27 * len(networks)
    pareto_height = 2.8 if pareto else 0.0
    figure = Figure(figsize=(6.6, ratio_height + pareto_height), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    if pareto:
        parts: Any = figure.subfigures(2, 1, height_ratios=[pareto_height, ratio_height])
        top, bottom = parts
        keys = sorted((k for k in pareto if k.startswith("K=")), key=lambda k: -int(k[2:]))
        for panel, key in zip(top.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
            _pareto(panel, pareto[key])
        _ratios(bottom.subplots(), networks)
    else:
        _ratios(figure.subplots(), networks)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _pareto(panel: Axes, result: dict[str, Any]) -> None:
    points = [(size, mc["cost"], mc["kl"]) for size, mc in result["mc"].items() if mc["kl"] is not None]
    panel.plot(*zip(*((cost, kl) for _, cost, kl in points), strict=True), ".-", color=COLORS[0], linewidth=1)
    for i, (size, cost, kl) in enumerate(points):
        text = f"MC dropout, T = {size}" if i == 0 else str(size)
        panel.annotate(text, (cost, kl), (5, 2), textcoords="offset points", fontsize=FONT - 1)
    for tier, (color, marker) in STYLE.items():
        point = result["tiers"][tier]["cost"], result["tiers"][tier]["kl"]
        panel.plot(*point, marker, color=color, markersize=6)
        above = tier == "paper"
        panel.annotate(
            tier,
            point,
            (0, 6 if above else -6),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            color=color,
            fontsize=FONT,
        )
    _mark_speed_up(panel, result["tiers"]["accurate"])
    panel.set(xscale="log", yscale="log")
    panel.margins(y=0.14)
    panel.set_xlim(1, 1.8 * max(points[-1][1], result["tiers"]["accurate"]["mc_cost_at_t_eq"]))
    panel.xaxis.set_major_formatter(_PLAIN)
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_minor_formatter(NullFormatter())
    outputs = result["fidelity"]["outputs"]
    kind = f"{outputs} classes: class probabilities" if outputs > 1 else "one output: mean and variance"
    panel.set_title(kind, fontsize=FONT)
    panel.set_xlabel("cost (plain passes)", fontsize=FONT)
    panel.set_ylabel("mean KL from converged MC dropout", fontsize=FONT)
    _tidy(panel)


def _mark_speed_up(panel: Axes, tier: dict[str, Any]) -> None:
    """From tier `accurate` to where MC dropout is as good."""
    start, end, kl = tier["cost"], tier["mc_cost_at_t_eq"], tier["kl"]
    panel.plot([start, end], [kl, kl], ":", color=STYLE["accurate"][0], linewidth=1, zorder=1)
    text = f"{tier['t_eq_bound']} {tier['speed_up']:.0f} times cheaper".strip()
    panel.annotate(text, (start, kl), (7, 2), textcoords="offset points", fontsize=FONT)


def _ratios(panel: Axes, networks: dict[str, Any]) -> None:
    panel.axvline(1, color="0.5", linewidth=0.8)
    for tier, offset in zip(TIERS, (-0.25, 0.0, 0.25), strict=True):
        color, marker = STYLE[tier]
        ratios = [result["rows"][tier]["std_ratio"] for result in networks.values()]
        rows = [i + offset for i in range(len(ratios))]
        panel.hlines(rows, [r["p05"] for r in ratios], [r["p95"] for r in ratios], color=color, linewidth=1.2)
        panel.plot([r["median"] for r in ratios], rows, marker, color=color, markersize=3.5, label=tier)
    panel.set_yticks(range(len(networks)), list(networks))
    panel.set_ylim(len(networks) - 0.5, -0.5)
    panel.set_xscale("log", base=2)  # half and twice are equally wrong
    panel.xaxis.set_major_formatter(_PLAIN)
    panel.set_xlabel("std / std of MC dropout (median and 5 to 95 % of outputs and inputs)", fontsize=FONT)
    panel.legend(fontsize=FONT - 1, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    _tidy(panel)
    panel.tick_params(axis="y", length=0)


def _tidy(panel: Axes) -> None:
    panel.tick_params(labelsize=FONT - 1)
    panel.spines[["top", "right"]].set_visible(False)
