"""Panels of the CIFAR figures: one value against another by density, and AUC by the number of samples."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter

from momentprop.evaluate import metrics
from momentprop.plots import COLORS, FONT, STYLES, legend_above, panels, tidy


def density_scatter(
    reference: Any,
    ours: Any,
    x_label: str = "MC dropout",
    y_label: str = "momentprop",
    axes: Axes | None = None,
) -> Axes:
    """One point per input: our value against the reference's, coloured by how many points are near.

    The grey line is equality; Pearson's r with its 95 % interval stands in the corner.

    Args:
        reference: values such as standard deviations by MC dropout.
        ours: the same values by the method to be judged.
        x_label: name of the reference and, where it has one, the unit.
        y_label: the same for ours.
        axes: where to draw.
    """
    r = metrics.pearson(torch.as_tensor(reference), torch.as_tensor(ours))
    panel: Axes = panels(axes, 1, 1, height=3.2)[0]
    x, y = np.asarray(reference).ravel(), np.asarray(ours).ravel()
    both = np.concatenate([x, y])
    margin = 0.03 * np.ptp(both)
    ends = (both.min() - margin, both.max() + margin)
    near = _points_near(x, y, ends)
    order = np.argsort(near, kind="stable")  # the densest on top
    # an image inside vector formats: ten thousand circles make a file that no reader scrolls through
    points = panel.scatter(
        x[order], y[order], c=near[order] / near.max(), s=4, cmap="viridis", linewidths=0, rasterized=True
    )
    panel.plot(ends, ends, color="0.6", linewidth=0.8, zorder=0)
    clear = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1.5}  # over points
    panel.text(0.03, 0.97, f"r = {r}", transform=panel.transAxes, va="top", fontsize=FONT - 1, bbox=clear)
    panel.set(aspect="equal", xlim=ends, ylim=ends)
    bar = panel.inset_axes((0.58, 0.11, 0.33, 0.03))  # below the line of equality, where few points are
    panel.figure.colorbar(points, cax=bar, orientation="horizontal", ticks=[])
    bar.set_title("points: few to many", fontsize=FONT - 1, pad=2, bbox=clear)
    return tidy(panel, x_label, y_label)


def auc_against_samples(
    sizes: Any,
    aucs: Any,
    lines: Mapping[str, float],
    name: str = "MC dropout",
    axes: Axes | None = None,
) -> Axes:
    """AUC of sampling against the number of samples T, beside methods that need none.

    Args:
        sizes: numbers of samples.
        aucs: [repetitions, sizes]: AUC by that many samples, each time with new ones.
        lines: AUC by method, drawn as horizontal lines.
        name: the sampling method.
        axes: where to draw.
    """
    panel: Axes = panels(axes, 1, 1, height=2.6)[0]
    sizes, aucs = np.asarray(sizes), np.asarray(aucs)
    if aucs.ndim != 2 or aucs.shape[1:] != sizes.shape:
        raise ValueError(f"aucs must be [repetitions, {len(sizes)} sizes], not {list(aucs.shape)}")
    n, mean, color = len(aucs), aucs.mean(0), COLORS[1]
    spread = aucs.std(0, ddof=1) if n > 1 else np.zeros_like(mean)
    label = f"{name}, mean ± std of {n} runs" if n > 1 else name
    panel.fill_between(sizes, mean - spread, mean + spread, color=color, alpha=0.25, linewidth=0)
    panel.plot(sizes, mean, color=color, linewidth=1.2, marker="o", markersize=3, label=label)
    others = [(c, s) for c, s in zip(COLORS, STYLES, strict=True) if c != color]
    for (method, value), (other, style) in zip(lines.items(), cycle(others), strict=False):
        panel.axhline(value, color=other, linestyle=style, linewidth=1.2, label=f"{method} ({value:.3f})")
    panel.set_xscale("log")
    panel.set_xticks(sizes if len(sizes) <= 10 else sizes[:: -(-len(sizes) // 10)])
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.xaxis.set_minor_formatter(NullFormatter())
    legend_above(panel)
    return tidy(panel, "samples T", "AUC")


def _points_near(x: Any, y: Any, ends: tuple[float, float], n_cells: int = 200) -> Any:
    """Count how many points are near each point, in cells of a grid that are smoothed over their neighbours.

    A kernel estimate would cost the square of the number of points.
    """
    edges = np.linspace(*ends, n_cells + 1)
    cells, _, _ = np.histogram2d(x, y, bins=(edges, edges))
    for _ in range(12):  # together a normal kernel whose std is 1.2 % of the side
        for axis in (0, 1):
            padded = np.pad(cells, [(1, 1) if a == axis else (0, 0) for a in (0, 1)])
            before, at, after = (padded.take(range(i, i + n_cells), axis) for i in range(3))
            cells = (before + 2 * at + after) / 4
    i, j = (np.clip(np.searchsorted(edges, v, side="right") - 1, 0, n_cells - 1) for v in (x, y))
    return cells[i, j]
