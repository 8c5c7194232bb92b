"""Figures: one function each, drawn without pyplot, so no global state and no window.

Every function draws into `axes` if given, else into a figure of its own, and returns the Axes; save with
`axes.figure.savefig(path)`. Colours are those of Okabe & Ito (2008), which colour-blind readers can tell
apart; hatching tells apart too where shapes overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch

from momentprop.errors import MissingExtraError
from momentprop.evaluate import metrics
from momentprop.predict.class_predictive import ClassPredictive

try:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgba
    from matplotlib.figure import Figure
except ImportError as error:
    raise MissingExtraError("matplotlib", "plots") from error

COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "-", "-", "-.", ":", "--", "-.")
FONT = 8  # points, at the width of one column of a paper
LEGEND: dict[str, Any] = {"fontsize": FONT - 1, "frameon": False}


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
    upper, lower = axes = panels(axes, 2, 1, width=5.2, height=4.4, sharey=False)
    x = np.asarray(x)
    upper.scatter(*map(np.asarray, observed), s=6, color="0.7", linewidths=0, label="training data")
    for name, style in styles(mean):
        values = np.asarray(mean[name])
        upper.plot(x, values, **style, linewidth=1, label=name)
        if name in std:
            half = 2 * np.asarray(std[name])
            lower.plot(x, values, **style, linewidth=1, label=f"{name}, mean ± 2 std")
            # one filled band and outlines over it: several fills would mix to grey
            if name == next(iter(std)):
                lower.fill_between(
                    x, values - half, values + half, color=style["color"], alpha=0.3, linewidth=0
                )
            else:
                for edge in (values - half, values + half):
                    lower.plot(x, edge, **style, linewidth=1)
    for panel in axes:
        for end in training_range:
            panel.axvline(end, color="0.4", linestyle=":", linewidth=1)
        legend_above(panel, 107)
    upper.set_xlim(x[0], x[-1])
    tidy(upper, "", "y")
    tidy(lower, "x (dotted lines: end of the training data)", "y")
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
    axes = panels(axes, 1, len(known), width=6.4, height=2.3)
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
        panel.set_title(name, fontsize=FONT + 1)
        tidy(panel, "entropy (nats)", "fraction of images" if panel is axes[0] else "")
    axes[-1].legend(**LEGEND, loc="upper right")
    return axes


def roc_curves(known: Mapping[str, Any], novel: Mapping[str, Any], axes: Axes | None = None) -> Axes:
    """Novel against known inputs by a score such as entropy: one ROC curve per method, AUC in the legend.

    Args:
        known: scores by method, for inputs of the kind trained on.
        novel: the same for inputs of another kind; higher scores should mark these.
        axes: where to draw.
    """
    panel: Axes = panels(axes, 1, 1, height=3.2)[0]
    panel.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
    for name, style in styles(known):
        scores = torch.as_tensor(known[name]), torch.as_tensor(novel[name])
        label = f"{name} (AUC {metrics.auroc(*scores).value:.3f})"
        panel.plot(*metrics.roc(*scores), **style, linewidth=1.2, label=label)
    panel.set(aspect="equal", xlim=(-0.01, 1), ylim=(0, 1.01))
    panel.legend(**LEGEND, loc="lower right", handlelength=1.6)
    return tidy(panel, "known inputs flagged as novel", "novel inputs found")


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
    panel: Axes = panels(axes, 1, 1, height=2.6)[0]
    for name, style in styles(curves):
        kept, accuracy = map(np.asarray, curves[name])
        if kept.shape != accuracy.shape:
            raise ValueError(f"{name}: {kept.shape} cut-offs but {accuracy.shape} accuracies")
        panel.plot(kept, accuracy, **style, linewidth=1.2, label=name)
    panel.margins(x=0)
    legend_above(panel)
    return tidy(panel, x_label, "accuracy on inputs kept")


def reliability_diagram(
    probs_by_method: Mapping[str, Any], target: Any, n_bins: int = 15, axes: Any = None
) -> Any:
    """Two panels over confidence: accuracy of each bin with its 95 % interval; number of inputs in it.

    The grey line is perfect calibration: below it a method is too sure. The legend gives the expected
    calibration error.

    Args:
        probs_by_method: what `classify` gives, or probabilities [batch, K, ...], by method.
        target: classes [batch, ...].
        n_bins: bins of equal width between 0 and 1; empty ones are left out.
        axes: two Axes to draw into.

    Returns:
        Array of the two Axes.
    """
    upper, lower = axes = panels(axes, 2, 1, height=4.0, sharey=False, ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
    target = torch.as_tensor(target)
    n_methods = len(probs_by_method)
    least = 1.0
    for i, (name, style) in enumerate(styles(probs_by_method)):
        color, probs = style["color"], probs_by_method[name]
        probs = probs if isinstance(probs, ClassPredictive) else torch.as_tensor(probs)
        confidence, accuracy, count = metrics.reliability(probs, target, n_bins)
        filled = count > 0
        error = (count * (accuracy - confidence).abs())[filled].sum().item() / count.sum().item()
        x, y, n = (values[filled].numpy() for values in (confidence, accuracy, count))
        intervals = [metrics.wilson(rate * size, size) for rate, size in zip(y, n, strict=True)]
        upper.vlines(x, [e.low for e in intervals], [e.high for e in intervals], color=color, alpha=0.4)
        marks = {"marker": "osD^v"[i % 5], "markersize": 3, "linewidth": 1.2}
        upper.plot(x, y, **style, **marks, label=f"{name} (ECE {error:.3f})")
        # beside each other within a bin, on a logarithmic axis: most inputs are in the last bins
        slot = 0.8 / n_bins / n_methods
        starts = np.flatnonzero(filled.numpy()) / n_bins + 0.1 / n_bins + i * slot
        lower.bar(starts, n, width=slot, align="edge", color=color, linewidth=0)
        least = min(least, float(np.floor(x[0] * n_bins) / n_bins))
    upper.set(xlim=(least, 1), ylim=(-0.02, 1.02))
    lower.set_yscale("log")
    lower.set_ylim(bottom=0.7)  # a single input still shows
    upper.legend(**LEGEND, loc="upper left")
    tidy(upper, "", "accuracy")
    tidy(lower, "confidence", "inputs")
    return axes


def styles(methods: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each method with the colour and style of its lines."""
    for name, color, style in zip(methods, cycle(COLORS), cycle(STYLES), strict=False):
        yield name, {"color": color, "linestyle": style}


def panels(
    axes: Any,
    rows: int,
    columns: int,
    *,
    height: float,
    width: float = 3.4,
    sharey: bool = True,
    ratios: Sequence[float] | None = None,
) -> Any:
    """Return the given Axes, one or several, as an array, or those of a new figure."""
    if axes is not None:
        return np.atleast_1d(np.asarray(axes, dtype=object)).ravel()
    figure = Figure(figsize=(width, height), dpi=180, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots(
        rows, columns, sharex=True, sharey=sharey, squeeze=False, height_ratios=ratios
    ).ravel()


def legend_above(panel: Axes, letters: int = 56) -> None:
    """Put the legend above the panel, where no curve can pass behind it, in as many columns as fit."""
    longest = max((len(label) for label in panel.get_legend_handles_labels()[1]), default=0)
    columns = max(1, min(4, letters // (longest + 8)))  # a wider one would squeeze the panel
    panel.legend(**LEGEND, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns)


def tidy(panel: Axes, x_label: str = "", y_label: str = "") -> Axes:
    """Label a panel, in small letters and without the lines that it does not need."""
    panel.set_xlabel(x_label, fontsize=FONT)
    panel.set_ylabel(y_label, fontsize=FONT)
    panel.tick_params(labelsize=FONT - 1)
    panel.spines[["top", "right"]].set_visible(False)
    return panel
