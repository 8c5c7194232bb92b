"""Figures of the UCI table: likelihoods beside MC dropout's, and standard deviations beside MC's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from momentprop import plots
from momentprop_reproduction.experiments.published import PAPER
from momentprop_reproduction.experiments.uci_evaluation import GAUSSIAN, JUMPS, TIERS

_FONT = 8
_PRINTED = "as the paper prints it"
_LOOK: dict[str, dict[str, Any]] = {
    "NN": {"color": plots.COLORS[0], "marker": "o"},
    "paper": {"color": plots.COLORS[1], "marker": "s"},
    "accurate": {"color": plots.COLORS[2], "marker": "D"},
    JUMPS: {"color": plots.COLORS[6], "marker": "*", "markersize": 7},
    GAUSSIAN: {"color": plots.COLORS[3], "marker": "|", "markersize": 11, "markeredgewidth": 1.5},
    _PRINTED: {"color": plots.COLORS[4], "marker": "x"},
}


def table_figure(sets: Mapping[str, Any]) -> Any:
    """Two panels over the sets: difference of the NLL to MC's in standard errors; std over MC's std.

    Args:
        sets: the rows that `uci.summarize` returns.

    Returns:
        The Figure.
    """
    figure = Figure(figsize=(6.4, 1.4 + 0.28 * len(sets)), dpi=180, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _likelihoods(left, sets)
    _stds(right, sets)
    left.set_yticks(range(len(sets)), list(sets))
    left.invert_yaxis()
    for panel in (left, right):
        panel.tick_params(labelsize=_FONT - 1)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="0.92", linewidth=0.6)
        panel.set_axisbelow(True)
    return figure


def _likelihoods(panel: Any, sets: Mapping[str, Any]) -> None:
    """Draw differences that are of order one where it matters and hundreds for a plain network.

    So the scale is linear within +-2 and then logarithmic.
    """
    panel.axvspan(-1, 1, color="0.88", linewidth=0, label="± 1 standard error of MC")
    panel.axvline(0, color="0.5", linewidth=0.8)
    for name, look in _LOOK.items():
        values = [_in_errors(key, row, name) for key, row in sets.items()]
        known = [(value, i) for i, value in enumerate(values) if value is not None]
        if known:
            panel.plot(*zip(*known, strict=True), label=name, **{"linestyle": "none", "markersize": 4} | look)
    panel.set_xscale("symlog", linthresh=2, linscale=1.5)
    low, high = panel.get_xlim()
    ticks = [t for t in (-100, -30, -10, -3, -1, 0, 1, 3, 10, 30, 100, 300, 1000) if low <= t <= high]
    panel.set_xticks(ticks, [str(t) for t in ticks])
    panel.minorticks_off()
    panel.set_xlabel("NLL less that of MC, in its standard errors\n(left is better)", fontsize=_FONT)
    panel.legend(
        fontsize=_FONT - 1,
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(-0.2, 1),
        ncols=2,
        columnspacing=1,
    )


def _in_errors(key: str, row: Mapping[str, Any], method: str) -> float | None:
    """A method's NLL less that of MC; what the paper prints is of other networks, and in our errors."""
    value: float | None
    if method != _PRINTED:
        value = row["methods"][method]["nll_difference"]["in_errors"]
        return value
    error = row["methods"]["MC"]["nll"]["standard_error"]
    if key not in PAPER or not error:
        return None
    value = (PAPER[key]["MP"]["nll"][0] - PAPER[key]["MC"]["nll"][0]) / error
    return value


def _stds(panel: Any, sets: Mapping[str, Any]) -> None:
    panel.axvline(1, color="0.5", linewidth=0.8)
    for i, row in enumerate(sets.values()):
        for offset, tier in zip((-0.15, 0.15), TIERS, strict=True):
            spread, look = row["std"][tier], _LOOK[tier]
            ends = [spread["ratio_5"], spread["ratio_95"]]
            panel.plot(ends, [i + offset] * 2, color=look["color"], linewidth=1.2)
            median = [spread["ratio_median"]]
            panel.plot(median, [i + offset], color=look["color"], marker=look["marker"], markersize=4)
    panel.set_xscale("log")
    ticks = [0.25, 0.5, 1, 2, 4]
    panel.set_xticks(ticks, [f"{t:g}" for t in ticks])
    panel.minorticks_off()
    panel.set_xlabel("std over that of MC\n(median and 5..95 % of test points)", fontsize=_FONT)
