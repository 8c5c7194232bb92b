"""The figures of one method beside MC dropout, and beside the targets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.evaluate.estimates import Estimate, mean_estimate
from momentprop.evaluate.metrics import (
    accuracy,
    auroc,
    brier,
    coverage,
    crps_gaussian,
    ece,
    nll,
    reliability,
    rmse,
    roc,
)
from momentprop.moments import Moments
from momentprop.predict.decisions import selective_curve
from momentprop.predict.regression import fit_noise, regress
from momentprop.sample import SampledMoments
from momentprop.validation.equivalence import correlation, entropy
from momentprop.validation.outputs import evenly
from momentprop.validation.sampling import Sampled
from momentprop.validation.tiers import Predicted

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Of the intervals whose coverage is measured."""

_BAND = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
_MOST_QUANTILES = 2**23  # torch sorts no more than 2^24
_RESAMPLES = 200
_WORST = 20
_POINTS = 200  # of a curve

Figures = dict[str, float | Estimate | None]


@dataclass(frozen=True)
class OutputRow:
    """Holds the figures of one output (or element of the outputs), over all inputs."""

    output: int
    std_ratio: float
    std_correlation: float
    mean_shift: float


def moment_figures(ours: Predicted, mc: Sampled) -> Figures:
    """Medians over all inputs and outputs that vary; the ratio with its 5th and 95th percentile."""
    varies = mc.is_known
    true, own = mc.variance[varies].sqrt(), ours.variance[varies].sqrt()
    ratio = own / true
    low, median, high = ratio[evenly(len(ratio), _MOST_QUANTILES)].quantile(_BAND).tolist()
    return {
        "std_ratio": median,
        "std_ratio_p05": low,
        "std_ratio_p95": high,
        "std_correlation": related(own, true),
        "std_correlation_limit": _limit(true, mc.variance_error[varies]),
        "mean_shift": ((ours.mean - mc.mean)[varies].abs() / true).median().item(),
    }


def sampling_errors(mc: Sampled) -> Figures:
    """Standard errors of MC dropout itself, medians: of its std, relative, and of its mean, in std."""
    varies = mc.is_known
    variance = mc.variance[varies]
    return {
        "unknown_share": 1 - varies.sum().item() / max(1, (mc.variance > 0).sum().item()),
        "std_error": (mc.variance_error[varies] / (2 * variance)).median().item(),
        "mean_error": (mc.mean_error[varies] / variance.sqrt()).median().item(),
    }


def worst_outputs(ours: Predicted, mc: Sampled) -> list[OutputRow]:
    """List outputs one by one, that whose std is furthest off first."""
    rows = []
    for k in range(mc.mean.shape[1]):
        varies = mc.is_known[:, k]
        if not bool(varies.any()):
            continue
        true, own = mc.variance[varies, k].sqrt(), ours.variance[varies, k].sqrt()
        shift = ((ours.mean[varies, k] - mc.mean[varies, k]).abs() / true).median().item()
        linked = related(own, true)
        rows.append(OutputRow(k, (own / true).median().item(), math.nan if linked is None else linked, shift))
    rows.sort(key=lambda r: -(abs(math.log(r.std_ratio)) if r.std_ratio > 0 else math.inf))
    return rows[:_WORST]


def related(a: Tensor, b: Tensor) -> float | None:
    """Pearson's correlation, where it is defined."""
    if a.numel() < 3 or a.std() <= 1e-9 * a.abs().mean() or b.std() <= 1e-9 * b.abs().mean():
        return None
    return correlation(a, b)


def _limit(std: Tensor, variance_error: Tensor) -> float:
    """The correlation that exact stds would have with sampled ones, by the error of the latter."""
    error = (variance_error / (2 * std)).square().mean()
    spread = std.var() if std.numel() > 1 else error
    return max(0.0, 1 - (error / spread).item()) ** 0.5 if spread > 0 else 0.0


def class_figures(probs: Tensor, truth: Tensor, targets: Tensor | None) -> tuple[Figures, dict[str, Any]]:
    """Compare probabilities [n, positions, K] with MC dropout's and with classes [n, positions]."""
    doubt = entropy(probs)
    figures: Figures = {"entropy_correlation": related(doubt, entropy(truth))}
    if targets is None:
        return figures, {}
    p, y = _as_metrics(probs, targets)
    selective = selective_curve(doubt.flatten(), (probs.argmax(-1) == targets).flatten())
    figures |= {
        "accuracy": accuracy(p, y),
        "nll": nll(p.clamp_min(1e-300) / p.sum(1, keepdim=True), y),
        "brier": brier(p, y),
        "ece": ece(p, y, n_resamples=_RESAMPLES),
        "selective_area": selective.area,
    }
    bins = torch.stack(reliability(p, y, 10))
    sure, right, count = bins[:, bins[2] > 0].tolist()
    kept = evenly(len(selective.coverage), _POINTS)
    coverage, correct = (v[kept].tolist() for v in (selective.coverage, selective.accuracy))
    return figures, {
        "reliability": {"confidence": sure, "accuracy": right, "count": count},
        "selective": {"coverage": coverage, "accuracy": correct},
    }


def predictive_of(ours: Predicted, rows: Tensor) -> Any:
    """Return what `regress` takes: samples where there are some, a plain output where nothing varies."""
    mean, variance = ours.mean[rows], ours.variance[rows]
    samples = ours.samples if isinstance(ours, Sampled) else None
    if samples is not None:
        kept = samples[:, rows].double()
        return SampledMoments(mean, variance, n_samples=len(kept), kept=kept)
    return Moments(mean, variance) if bool((variance > 0).any()) else mean


def regression_figures(ours: Predicted, targets: Tensor) -> tuple[Figures, dict[str, Any]]:
    """Fit the noise on every second input, and measure everything on the others."""
    numbers = torch.arange(len(targets))
    fitted, judged = (numbers[::2], numbers[1::2]) if len(numbers) > 1 else (numbers, numbers)
    y = targets.double()
    noise = fit_noise(predictive_of(ours, fitted), y[fitted])
    found = regress(predictive_of(ours, judged), noise=noise)
    y = y[judged]
    # y lies within a central interval if its quantile does, which needs no ends, found by bisection
    quantile = found.cdf(y)
    ends = [[torch.full_like(quantile, (1 + sign * level) / 2) for sign in (-1, 1)] for level in LEVELS]
    covered = [coverage(low, high, quantile) for low, high in ends]
    figures: Figures = {
        "rmse": rmse(found.mean, y, n_resamples=_RESAMPLES),
        "nll": mean_estimate(found.nll(y), 0.95),
        "crps": crps_gaussian(found.mean, found.std, y),
        "coverage_90": covered[LEVELS.index(0.9)],
        "noise_std": noise.sqrt().item(),
    }
    return figures, {"coverage": {"level": list(LEVELS), "covered": [c.value for c in covered]}}


def novelty(ours: Predicted) -> Tensor:
    """One score per input, higher for novel ones: entropy, or the mean std where there are no classes."""
    if ours.probs is not None:
        return entropy(ours.probs).mean(1)
    return ours.variance.sqrt().mean(1)


def novelty_figures(known: Tensor, novel: Tensor) -> tuple[Figures, dict[str, Any]]:
    """Return the AUROC of novel against known inputs, and the ROC curve."""
    figures: Figures = {"ood_auroc": auroc(known, novel)}
    false, true = roc(known, novel)
    kept = torch.cat([torch.zeros(1, dtype=torch.long), 1 + evenly(len(false) - 1, _POINTS)])
    return figures, {"roc": {"false": false[kept].tolist(), "true": true[kept].tolist()}}


def _as_metrics(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities [n, K, positions] and targets [n, positions], as in F.cross_entropy."""
    if probs.shape[1] == 1:
        return probs[:, 0], targets[:, 0].long()
    return probs.mT, targets.long()
