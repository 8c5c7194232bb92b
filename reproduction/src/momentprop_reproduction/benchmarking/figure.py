"""The figure of a run: what each method costs in plain passes, by runtime and batch size."""

from __future__ import annotations

import os
from typing import Any

from momentprop_reproduction.benchmarking.rows import Result


def draw(result: Result, path: str | os.PathLike[str]) -> None:
    """Draw a panel per runtime and number of threads; bars of the median, ticks of the multiply-add limit."""
    from momentprop.plots import COLORS

    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
    except ImportError as error:  # momentprop.plots has said so already
        raise AssertionError from error

    threads = list(dict.fromkeys(row.threads for row in result.rows))
    runtimes = list(dict.fromkeys(row.runtime for row in result.rows))
    methods = [m for m in dict.fromkeys(row.method for row in result.rows) if m != "plain"]
    figure = Figure(
        figsize=(1.2 + 2.4 * len(runtimes), 0.7 + 2.1 * len(threads)), dpi=180, layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(threads), len(runtimes), sharex=True, sharey=True, squeeze=False)
    # without black, on which the marks of the limit could not be seen
    colors = {method: COLORS[1 + i % (len(COLORS) - 1)] for i, method in enumerate(reversed(methods))}
    for line, n in zip(axes, threads, strict=True):
        for panel, runtime in zip(line, runtimes, strict=True):
            _panel(panel, result, n, runtime, methods, colors)
            panel.set_title(f"{runtime}, {n} thread{'s' * (n > 1)}", fontsize=9)
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            panel.yaxis.set_minor_formatter(NullFormatter())
        line[0].set_ylabel("time, in plain passes", fontsize=8)
    for panel in axes[-1]:
        panel.set_xlabel("batch", fontsize=8)
    found = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    labels = [*methods, *(label for label in found if label not in methods)]
    figure.legend(
        [found[label] for label in labels],
        labels,
        fontsize=8,
        frameon=False,
        loc="outside upper center",
        ncols=min(6, len(labels)),
    )
    figure.savefig(path)


def _panel(
    panel: Any, result: Result, threads: int, runtime: str, methods: list[str], colors: dict[str, str]
) -> None:
    batches = list(dict.fromkeys(row.batch for row in result.rows))
    width = 0.8 / max(1, len(methods))
    labelled = False
    for i, method in enumerate(methods):
        rows = {row.batch: row for row in result.of(threads=threads, runtime=runtime, method=method)}
        places = [k - 0.4 + width * (i + 0.5) for k in range(len(batches))]
        heights = [rows[b].median_ratio if b in rows else None for b in batches]
        shown = [h if h is not None else 0.0 for h in heights]
        panel.bar(places, shown, width=0.9 * width, color=colors[method], label=method, linewidth=0)
        for place, height, batch in zip(places, heights, batches, strict=True):
            if height is None:
                continue
            told = f"{height:.0f}" if height >= 10 else f"{height:.2g}"
            panel.text(place, height, told, ha="center", va="bottom", fontsize=5, rotation=90)
            limit = rows[batch].limit
            if limit is not None:
                label = None if labelled else "multiply-adds"
                panel.hlines(
                    limit, place - width / 2, place + width / 2, color="0.25", linewidth=1, label=label
                )
                labelled = True
    panel.axhline(1, color="0.6", linewidth=0.8, zorder=0)
    panel.set_yscale("log")
    panel.set_xticks(range(len(batches)), [str(b) for b in batches])
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
