"""Compares every method with MC dropout and with the targets: figures, curves, worths and the verdict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.errors import InputError
from momentprop.validation import figures as measured
from momentprop.validation.equivalence import equivalent_samples
from momentprop.validation.findings import MC, PLAIN
from momentprop.validation.latency import LatencyRow
from momentprop.validation.layers import LayerRow
from momentprop.validation.outputs import Layout, evenly
from momentprop.validation.sampling import Sampled, kind_of
from momentprop.validation.tiers import Predicted
from momentprop.validation.verdict import judge

_SCATTER = 1000  # points of the chart of stds

Methods = dict[str, Predicted]


def compare(
    predicted: dict[str, Predicted],
    mc: Sampled,
    layout: Layout,
    targets: Tensor | None,
    latency: list[LatencyRow],
    layers: dict[str, list[LayerRow]],
) -> dict[str, Any]:
    """Compare all methods with MC dropout and the targets; return the fields of `Findings` by name."""
    if not bool((mc.variance > 0).any()):
        raise InputError(
            "the outputs do not vary in a single one of these inputs: no dropout has any effect on them"
        )
    methods: Methods = {PLAIN: predicted[PLAIN], MC: mc, **{k: v for k, v in predicted.items() if k != PLAIN}}
    kind, truth = kind_of(layout), _predictive(mc)
    y = None if targets is None else layout.target_rows(targets)[: len(mc)]
    figures: dict[str, measured.Figures] = {MC: measured.sampling_errors(mc)}
    curves: dict[str, dict[str, Any]] = {}
    worths, worst, scatter = {}, {}, {}
    chosen = evenly(mc.variance.numel(), _SCATTER)
    for name, rows in methods.items():
        found, drawn = figures.pop(name, {}), curves.setdefault(name, {})
        if name != MC:
            found |= measured.moment_figures(rows, mc)
            found["kl"] = kl = kind.kl(truth, _predictive(rows)).nanmean().item()
            if name != PLAIN:
                worths[name] = equivalent_samples(kl, mc.curve)
                worst[name] = measured.worst_outputs(rows, mc)
        if name != PLAIN:
            scatter[name] = rows.variance.flatten()[chosen].sqrt().tolist()
        if rows.probs is not None and mc.probs is not None:
            more, lines = measured.class_figures(rows.probs, mc.probs, y)
        elif layout.task == "regression" and y is not None:
            more, lines = measured.regression_figures(rows, y)
        else:
            more, lines = {}, {}
        found |= more
        drawn |= lines
        figures[name] = found
    cost = {name: latency[-1].ratios[name] for name in worths} if latency else {}
    return {
        "figures": figures,
        "curves": curves,
        "worths": worths,
        "worst_outputs": worst,
        "convergence": mc.curve,
        "scatter": scatter,
        "verdict": judge(worths, figures, cost, layers, mc.n_samples),
    }


def add_novelty(found: dict[str, Any], known: Methods, novel: Methods, layout: Layout) -> None:
    """Add to figures and curves how well each method tells novel inputs from known ones."""
    for name, rows in novel.items():
        if name == PLAIN and not layout.is_classes:
            continue  # it has no score
        more, drawn = measured.novelty_figures(measured.novelty(known[name]), measured.novelty(rows))
        found["figures"][name] |= more
        found["curves"][name] |= drawn


def _predictive(rows: Predicted) -> Tensor:
    """Return the predictive as equivalence.py has it: [n, positions, K], or [n, elements, 2]."""
    return rows.probs if rows.probs is not None else torch.stack([rows.mean, rows.variance], -1)
