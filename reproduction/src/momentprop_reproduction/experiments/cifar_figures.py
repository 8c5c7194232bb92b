"""Figures 4 to 9 of the paper, with the accurate tier beside the paper's rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

import momentprop as mp
from momentprop import plots
from momentprop_reproduction.experiments.cifar_evaluation import by_size
from momentprop_reproduction.experiments.cifar_panels import auc_against_samples, density_scatter

NAMES = {"NN": "NN", "MC": "MC", "paper": "MP, paper tier", "accurate": "MP, accurate tier"}
KINDS = ("known", "novel")


def draw(
    found: Mapping[str, Any], log_probs: Mapping[str, Tensor], truth: Tensor, labels: Tensor
) -> dict[str, Figure]:
    """All figures by name.

    Args:
        found: what the evaluation found.
        log_probs: of the networks of five classes, [members, images, classes] by method.
        truth: of the first of them, by many samples.
        labels: -1 for novel classes.
    """
    first = {name: mp.ClassPredictive(values[0].double()) for name, values in log_probs.items()}
    few, many = (f"MC, T = {found[name]:,}" for name in ("n_samples", "truth_samples"))
    sampled = mp.ClassPredictive(truth.double())
    probability = {name: p.probs[:, 0] for name, p in first.items()}
    entropy = {name: p.entropy for name, p in first.items()}
    others = ("NN", "paper", "accurate")
    sizes = by_size(log_probs)
    return {
        "cifar_probability": _scatters(
            probability["MC"], {n: probability[n] for n in others}, few, labels, "p(airplane)"
        ),
        "cifar_entropy": _scatters(entropy["MC"], {n: entropy[n] for n in others}, few, labels, "entropy"),
        "cifar_entropy_truth": _scatters(sampled.entropy, entropy, many, labels, "entropy", few),
        "cifar_histograms": _histograms(entropy, labels, few),
        "cifar_roc": _roc(sizes, labels, few),
        "cifar_auc_by_samples": _auc_by_samples(found),
        "cifar_filter": _filter(found),
    }


def _scatters(
    reference: Tensor, ours: Mapping[str, Tensor], name: str, labels: Tensor, value: str, few: str = "MC"
) -> Figure:
    """A row for known and one for novel classes, a column for each method."""
    figure = _figure(2.7 * len(ours), 5.4)
    axes = figure.subplots(2, len(ours), squeeze=False)
    for row, kind, chosen in zip(axes, KINDS, (labels >= 0, labels < 0), strict=True):
        for panel, (method, values) in zip(row, ours.items(), strict=True):
            label = few if method == "MC" else NAMES[method]
            density_scatter(reference[chosen], values[chosen], f"{value}, {name}", f"{value}, {label}", panel)
        row[0].set_title(f"{kind} classes", loc="left", fontsize=9)
    return figure


def _histograms(entropy: Mapping[str, Tensor], labels: Tensor, few: str) -> Figure:
    figure = _figure(7.6, 2.5)
    axes = figure.subplots(1, len(entropy), sharex=True, sharey=True)
    known, novel = (
        {_label(name, few): values[chosen] for name, values in entropy.items()}
        for chosen in (labels >= 0, labels < 0)
    )
    last = plots.entropy_histograms(known, novel, axes)[-1]
    last.get_legend().remove()  # it would cover a bar
    handles = last.get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    return figure


def _roc(sizes: Mapping[str, Mapping[str, mp.ClassPredictive]], labels: Tensor, few: str) -> Figure:
    figure = _figure(3.4 * len(sizes), 3.4)
    axes = figure.subplots(1, len(sizes), squeeze=False)[0]
    for panel, (n, predicted) in zip(axes, sizes.items(), strict=True):
        known, novel = (
            {_label(name, few): p.entropy[chosen] for name, p in predicted.items()}
            for chosen in (labels >= 0, labels < 0)
        )
        plots.roc_curves(known, novel, panel).set_title(f"ensemble of {n}", fontsize=9)
    return figure


def _auc_by_samples(found: Mapping[str, Any]) -> Figure:
    by_samples, aucs = found["by_samples"], found["novelty"]["1"]
    lines = {NAMES[name]: aucs[name]["value"] for name in ("NN", "paper", "accurate")}
    panel = auc_against_samples(by_samples["sizes"], by_samples["aucs"], lines)
    panel.set_xticks([t for t in (1, 2, 5, 10, 20, 50, 100, 200) if t <= by_samples["sizes"][-1]])
    figure = panel.figure
    assert isinstance(figure, Figure)
    return figure


def _filter(found: Mapping[str, Any]) -> Figure:
    """A row for each setting: with novel classes, which are never right, and without."""
    few = f"MC, T = {found['n_samples']:,}"
    settings = {"five": "five known and five novel classes", "ten": "ten known classes"}
    sizes = sorted({1, found["n_members"]})
    figure = _figure(3.4 * len(sizes), 5.4)
    axes = figure.subplots(2, len(sizes), squeeze=False, sharex="row", sharey="row")
    for row, (setting, title) in zip(axes, settings.items(), strict=True):
        curves = found["filter"][setting]
        for panel, n in zip(row, sizes, strict=True):
            shown = {
                _label(name, few): (
                    curves["cutoff"],
                    [float("nan") if a is None else a for a in values["accuracy"]],
                )
                for name, values in curves[str(n)].items()
            }
            plots.filter_curve(shown, f"largest entropy kept (nats), ensemble of {n}", panel)
        row[0].set_ylabel(f"accuracy, {title}", fontsize=8)
        for panel in row[1:]:
            panel.set_ylabel("")
            panel.get_legend().remove()
    return figure


def _label(name: str, few: str) -> str:
    return few if name == "MC" else NAMES[name]


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=180, layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot
    return figure
