"""Figures: one function each, drawn without pyplot, so no global state and no window.

Every function draws into `axes` if given, else into a figure of its own, and returns the Axes; save with
`axes.figure.savefig(path)`. Colours are those of Okabe & Ito (2008), which colour-blind readers can tell
apart; hatching tells apart too where shapes overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import torch

from momentprop.errors import MissingExtraError
from momentprop.evaluate import metrics

try:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgba
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter
except ImportError as error:
    raise MissingExtraError("matplotlib", "plots") from error

COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "-", "-", "-.", ":", "--", "-.")
_FONT = 8  # points, at the width of one column of a paper


def regression_bands(
    x: Any,
    mean: Mapping[str, Any],
    std: Mapping[str, Any],
    observed: tuple[Any, Any],
    training_range: tuple[float, float],
    axes: Any = None,
) -> Any:
    """Two panels over one input: means with the training data; means with bands of two std.

    Args:
        x: the inputs, in ascending order.
        mean: predictive means by method.
        std: standard deviations by method; methods without an entry get no band. The first band is
            filled, the others are outlines.
        observed: inputs and targets of the training data.
        training_range: where the training data end; marked by vertical lines.
        axes: two Axes to draw into.

    Returns:
        Array of the two Axes.
    """
    upper, lower = axes = _axes(axes, 2, 1, width=5.2, height=4.4, sharey=False)
    x = np.asarray(x)
    upper.scatter(*map(np.asarray, observed), s=6, color="0.7", linewidths=0, label="training data")
    for (name, values), color, style in zip(mean.items(), cycle(COLORS), cycle(STYLES), strict=False):
        values = np.asarray(values)
        upper.plot(x, values, color=color, linestyle=style, linewidth=1, label=name)
        if name in std:
            half = 2 * np.asarray(std[name])
            lower.plot(x, values, color=color, linestyle=style, linewidth=1, label=f"{name}, mean ± 2 std")
            # one filled band and outlines over it: several fills would mix to grey
            if name == next(iter(std)):
                lower.fill_between(x, values - half, values + half, color=color, alpha=0.3, linewidth=0)
            else:
                for edge in (values - half, values + half):
                    lower.plot(x, edge, color=color, linestyle=style, linewidth=1)
    for panel in axes:
        for end in training_range:
            panel.axvline(end, color="0.4", linestyle=":", linewidth=1)
        panel.set_ylabel("y", fontsize=_FONT)
        # above the panel, where no curve can pass behind it; about 107 letters and lines fit side by side
        longest = max(len(label) for label in panel.get_legend_handles_labels()[1]) if mean else 0
        columns = max(1, min(4, 107 // (longest + 8)))
        panel.legend(
            fontsize=_FONT - 1, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns
        )
        _tidy(panel)
    upper.set_xlim(x[0], x[-1])
    lower.set_xlabel("x (dotted lines: end of the training data)", fontsize=_FONT)
    return axes


def entropy_histograms(
    known: Mapping[str, Any], novel: Mapping[str, Any], axes: Any = None, n_bins: int = 25
) -> Any:
    """One panel per method: predictive entropy of inputs of known and of novel kind.

    Args:
        known: entropies (nats) by method, for inputs of the kind trained on.
        novel: the same for inputs of another kind.
        axes: as many Axes as methods, to draw into.
        n_bins: number of bars between zero and the largest entropy.

    Returns:
        Array of the Axes.
    """
    axes = _axes(axes, 1, len(known), width=6.4, height=2.3)
    largest = max(float(np.max(v)) for values in (known, novel) for v in map(np.asarray, values.values()))
    bins = np.linspace(0, largest, n_bins + 1)
    for panel, name in zip(axes, known, strict=True):
        for label, values, color, hatch in (
            ("known classes", known[name], COLORS[2], None),
            ("novel classes", novel[name], COLORS[1], "/////"),
        ):
            values = np.asarray(values)
            weights = np.full(len(values), 1 / len(values))  # fractions: the groups differ in size
            panel.hist(
                values,
                bins=bins,
                weights=weights,
                histtype="stepfilled",
                facecolor=to_rgba(color, 0.35),
                edgecolor=color,
                hatch=hatch,
                label=label,
            )
        panel.set_title(name, fontsize=_FONT + 1)
        panel.set_xlabel("entropy (nats)", fontsize=_FONT)
        _tidy(panel)
    axes[0].set_ylabel("fraction of images", fontsize=_FONT)
    axes[-1].legend(fontsize=_FONT - 1, frameon=False, loc="upper right")
    return axes


def roc_curves(known: Mapping[str, Any], novel: Mapping[str, Any], axes: Axes | None = None) -> Axes:
    """Novel against known inputs by a score such as entropy: one ROC curve per method, AUC in the legend.

    Args:
        known: scores by method, for inputs of the kind trained on.
        novel: the same for inputs of another kind; higher scores should mark these.
        axes: where to draw.
    """
    panel: Axes = _axes(None if axes is None else [axes], 1, 1, width=3.4, height=3.2)[0]
    panel.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
    for name, color, style in zip(known, cycle(COLORS), cycle(STYLES), strict=False):
        scores = torch.as_tensor(known[name]), torch.as_tensor(novel[name])
        label = f"{name} (AUC {metrics.auroc(*scores).value:.3f})"
        panel.plot(*metrics.roc(*scores), color=color, linestyle=style, linewidth=1.2, label=label)
    panel.set_xlabel("known inputs flagged as novel", fontsize=_FONT)
    panel.set_ylabel("novel inputs found", fontsize=_FONT)
    panel.set(aspect="equal", xlim=(-0.01, 1), ylim=(0, 1.01))
    panel.legend(fontsize=_FONT - 1, frameon=False, loc="lower right", handlelength=1.6)
    _tidy(panel)
    return panel


def filter_curve(
    curves: Mapping[str, tuple[Any, Any]], x_label: str = "fraction of inputs kept", axes: Axes | None = None
) -> Axes:
    """Accuracy on the inputs that a method keeps when it sets the most uncertain aside.

    Args:
        curves: by method, what is kept and the accuracy on it. What is kept is either a fraction (coverage)
            or the largest entropy that is not set aside (cut-off); NaN where nothing is kept.
        x_label: what the first of the two is.
        axes: where to draw.
    """
    panel: Axes = _axes(None if axes is None else [axes], 1, 1, width=3.4, height=2.6)[0]
    for (name, (kept, accuracy)), color, style in zip(
        curves.items(), cycle(COLORS), cycle(STYLES), strict=False
    ):
        kept, accuracy = np.asarray(kept), np.asarray(accuracy)
        if kept.shape != accuracy.shape:
            raise ValueError(f"{name}: {kept.shape} cut-offs but {accuracy.shape} accuracies")
        panel.plot(kept, accuracy, color=color, linestyle=style, linewidth=1.2, label=name)
    panel.set_xlabel(x_label, fontsize=_FONT)
    panel.set_ylabel("accuracy on inputs kept", fontsize=_FONT)
    panel.margins(x=0)
    _legend_above(panel)
    _tidy(panel)
    return panel


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
    panel: Axes = _axes(None if axes is None else [axes], 1, 1, width=3.4, height=3.2)[0]
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
    panel.text(0.03, 0.97, f"r = {r}", transform=panel.transAxes, va="top", fontsize=_FONT - 1, bbox=clear)
    panel.set(aspect="equal", xlim=ends, ylim=ends)
    panel.set_xlabel(x_label, fontsize=_FONT)
    panel.set_ylabel(y_label, fontsize=_FONT)
    bar = panel.inset_axes((0.58, 0.11, 0.33, 0.03))  # below the line of equality, where few points are
    panel.figure.colorbar(points, cax=bar, orientation="horizontal", ticks=[])
    bar.set_title("points: few to many", fontsize=_FONT - 1, pad=2, bbox=clear)
    _tidy(panel)
    return panel


def reliability_diagram(
    probs_by_method: Mapping[str, Any], target: Any, n_bins: int = 15, axes: Any = None
) -> Any:
    """Two panels over confidence: accuracy of each bin with its 95 % interval; number of inputs in it.

    The grey line is perfect calibration: below it a method is too sure. The legend gives the expected
    calibration error.

    Args:
        probs_by_method: probabilities [batch, K, ...] by method.
        target: classes [batch, ...].
        n_bins: bins of equal width between 0 and 1; empty ones are left out.
        axes: two Axes to draw into.

    Returns:
        Array of the two Axes.
    """
    upper, lower = axes = _axes(axes, 2, 1, width=3.4, height=4.0, sharey=False, ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
    target = torch.as_tensor(target)
    n_methods = len(probs_by_method)
    least = 1.0
    for i, (name, probs) in enumerate(probs_by_method.items()):
        color, style = COLORS[i % len(COLORS)], STYLES[i % len(STYLES)]
        probs = torch.as_tensor(probs)
        confidence, accuracy, count = metrics.reliability(probs, target, n_bins)
        filled = count > 0
        error = (count * (accuracy - confidence).abs())[filled].sum().item() / count.sum().item()
        x, y, n = (values[filled].numpy() for values in (confidence, accuracy, count))
        intervals = [metrics.wilson(rate * size, size) for rate, size in zip(y, n, strict=True)]
        upper.vlines(x, [e.low for e in intervals], [e.high for e in intervals], color=color, alpha=0.4)
        upper.plot(
            x,
            y,
            color=color,
            linestyle=style,
            linewidth=1.2,
            marker="osD^v"[i % 5],
            markersize=3,
            label=f"{name} (ECE {error:.3f})",
        )
        # beside each other within a bin, on a logarithmic axis: most inputs are in the last bins
        slot = 0.8 / n_bins / n_methods
        starts = np.flatnonzero(filled.numpy()) / n_bins + 0.1 / n_bins + i * slot
        lower.bar(starts, n, width=slot, align="edge", color=color, linewidth=0)
        least = min(least, float(np.floor(x[0] * n_bins) / n_bins))
    upper.set(xlim=(least, 1), ylim=(-0.02, 1.02))
    upper.set_ylabel("accuracy", fontsize=_FONT)
    lower.set_yscale("log")
    lower.set_ylim(bottom=0.7)  # a single input still shows
    lower.set_ylabel("inputs", fontsize=_FONT)
    lower.set_xlabel("confidence", fontsize=_FONT)
    upper.legend(fontsize=_FONT - 1, frameon=False, loc="upper left")
    for panel in axes:
        _tidy(panel)
    return axes


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
    panel: Axes = _axes(None if axes is None else [axes], 1, 1, width=3.4, height=2.6)[0]
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
    panel.set_xlabel("samples T", fontsize=_FONT)
    panel.set_ylabel("AUC", fontsize=_FONT)
    _legend_above(panel)
    _tidy(panel)
    return panel


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


def _legend_above(panel: Axes) -> None:
    """Above the panel, where no curve can pass behind it; two columns if they fit."""
    longest = max((len(label) for label in panel.get_legend_handles_labels()[1]), default=0)
    columns = 2 if longest <= 20 else 1  # a legend wider than the figure would squeeze the panel
    panel.legend(fontsize=_FONT - 1, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns)


def _axes(
    axes: Any,
    rows: int,
    columns: int,
    *,
    width: float,
    height: float,
    sharey: bool = True,
    ratios: Sequence[float] | None = None,
) -> Any:
    """The given Axes as an array, or those of a new figure."""
    if axes is not None:
        return np.asarray(axes, dtype=object).ravel()
    figure = Figure(figsize=(width, height), dpi=180, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots(
        rows, columns, sharex=True, sharey=sharey, squeeze=False, height_ratios=ratios
    ).ravel()


def _tidy(panel: Axes) -> None:
    panel.tick_params(labelsize=_FONT - 1)
    panel.spines[["top", "right"]].set_visible(False)
