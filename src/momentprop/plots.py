"""Figures: one function each, drawn without pyplot, so no global state and no window.

Every function draws into `axes` if given, else into a figure of its own, and returns the Axes; save with
`axes.figure.savefig(path)`. Colours are those of Okabe & Ito (2008), which colour-blind readers can tell
apart; hatching tells apart too where shapes overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

from momentprop.errors import MissingExtraError

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
        # above the panel, where no curve can pass behind it
        panel.legend(fontsize=_FONT - 1, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
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
        false_rate, true_rate, area = _roc(np.asarray(known[name]), np.asarray(novel[name]))
        label = f"{name} (AUC {area:.3f})"
        panel.plot(false_rate, true_rate, color=color, linestyle=style, linewidth=1.2, label=label)
    panel.set_xlabel("known inputs flagged as novel", fontsize=_FONT)
    panel.set_ylabel("novel inputs found", fontsize=_FONT)
    panel.set(aspect="equal", xlim=(-0.01, 1), ylim=(0, 1.01))
    panel.legend(fontsize=_FONT - 1, frameon=False, loc="lower right", handlelength=1.6)
    _tidy(panel)
    return panel


def _roc(known: Any, novel: Any) -> tuple[Any, Any, float]:
    """False and true positive rate at every threshold, and the area under their curve."""
    try:
        from sklearn.metrics import auc, roc_curve
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "data") from error
    is_novel = np.repeat([False, True], [len(known), len(novel)])
    false_rate, true_rate, _ = roc_curve(is_novel, np.concatenate([known, novel]))
    return false_rate, true_rate, auc(false_rate, true_rate)


def _axes(axes: Any, rows: int, columns: int, *, width: float, height: float, sharey: bool = True) -> Any:
    """The given Axes as an array, or those of a new figure."""
    if axes is not None:
        return np.asarray(axes, dtype=object).ravel()
    figure = Figure(figsize=(width, height), dpi=180, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False).ravel()


def _tidy(panel: Axes) -> None:
    panel.tick_params(labelsize=_FONT - 1)
    panel.spines[["top", "right"]].set_visible(False)
