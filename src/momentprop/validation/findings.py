"""Holds what validation found out, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from momentprop.evaluate.estimates import Estimate
from momentprop.validation.equivalence import Samples
from momentprop.validation.figures import Figures, OutputRow
from momentprop.validation.latency import LatencyRow
from momentprop.validation.layers import LayerRow
from momentprop.validation.verdict import Verdict

PLAIN, MC, SAVED = "plain", "MC dropout", "saved"

LABELS = {
    "t_eq": "worth in MC samples",
    "std_ratio": "std / MC std",
    "std_ratio_p05": "5th percentile",
    "std_ratio_p95": "95th percentile",
    "std_correlation": "std correlation",
    "mean_shift": "mean shift / std",
    "kl": "KL from MC",
    "entropy_correlation": "entropy correlation",
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier score",
    "ece": "ECE",
    "selective_area": "risk-coverage area",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage_90": "coverage of 90 %",
    "noise_std": "fitted noise std",
    "ood_auroc": "AUROC of novelty",
    "output": "output",
    "where": "module",
    "short_operator": "operator",
    "depth": "depth",
    "introduced": "error introduced",
}
"""What figures are called in tables."""

AGREEMENT = ("t_eq", "std_ratio", "std_correlation", "mean_shift", "kl", "entropy_correlation")
QUALITY = (
    "accuracy",
    "nll",
    "brier",
    "ece",
    "selective_area",
    "rmse",
    "crps",
    "coverage_90",
    "noise_std",
    "ood_auroc",
)


@dataclass(frozen=True)
class Findings:
    """Compares every method with MC dropout. `figures` and `curves` go by the method's name."""

    model: str
    task: str
    n_inputs: int
    n_samples: int
    seed: int
    n_ood: int = 0
    partial: bool = False
    outputs: tuple[int, ...] = ()
    figures: dict[str, Figures] = field(default_factory=dict)
    worths: dict[str, Samples] = field(default_factory=dict)
    convergence: dict[int, float] = field(default_factory=dict)  # size of a block of samples -> divergence
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)
    scatter: dict[str, Any] = field(default_factory=dict)  # std of MC, and of every tier, at the same places
    worst_outputs: dict[str, list[OutputRow]] = field(default_factory=dict)
    latency: list[LatencyRow] = field(default_factory=list)
    layers: dict[str, list[LayerRow]] = field(default_factory=dict)
    layer_inputs: int = 0
    layer_samples: int = 0
    missing: dict[str, str] = field(default_factory=dict)  # tier -> why it is not there
    missing_layers: dict[str, str] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=lambda: Verdict("mc", ()))
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""

    @property
    def tiers(self) -> list[str]:
        return list(self.worths)

    @property
    def sampling_error(self) -> str:
        """Say in words how well MC dropout itself is known."""
        std, mean, left_out = (
            self.figures.get(MC, {}).get(name) for name in ("std_error", "mean_error", "unknown_share")
        )
        said = (
            f"Standard errors of MC dropout with {self.n_samples:,} samples (medians): "
            f"{shown(std)} of its std, relative; {shown(mean)} std of its mean"
        )
        if isinstance(left_out, float) and left_out > 0:
            said += f". Left out: {left_out:.1%} of the outputs, whose std is not known to 25 %"
        return said

    def t_eq(self, tier: str | None = None) -> Samples:
        """Return what a tier is worth in MC samples; by default the recommended tier, or else the best."""
        if tier is None:
            chosen = self.verdict.recommendation
            tier = chosen if chosen in self.worths else max(self.worths, key=lambda t: self.worths[t].value)
        return self.worths[tier]


def shown(value: float | Estimate | Samples | str | None) -> str:
    """Write a figure, or what else stands in a table, as text."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"
    return str(value)
