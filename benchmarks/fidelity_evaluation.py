"""One network, all tiers: moments and predictive distributions beside those of MC dropout."""

from __future__ import annotations

from typing import Any

import torch
from fidelity_networks import Case
from predictives import Classes, Gaussian, Predictive, convergence
from torch import Tensor, nn

import momentprop as mp
from momentprop.validation.equivalence import correlation, entropy, equivalent_samples

TIERS = ("paper", "fast", "accurate")
PLAIN, OWN_SOFTMAX, LIMIT = "plain", "paper, its own softmax", "Gaussian with MC's own mean and covariance"
SIZES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
BATCH = 50  # inputs at a time


def evaluate(case: Case, reference: Tensor, independent: Tensor, sizes: list[int]) -> dict[str, Any]:
    """Every row's distance from converged MC dropout, in moments, divergence and equivalent samples."""
    kind: Predictive = Classes() if case.has_classes else Gaussian()
    reference = reference.double()
    mean, covariance = _moments(reference)
    std = _std(covariance)
    truth = kind.of_samples(reference)
    curve = convergence(kind, truth, independent, sizes)
    one, two = reference.chunk(2)
    halves: dict[str, Any] = _beside(one.mean(0), one.std(0), two.mean(0), two.std(0))
    halves["kl"] = kind.kl(kind.of_samples(two), kind.of_samples(one)).mean().item()

    def distance(predictive: Tensor) -> dict[str, Any]:
        kl = kind.kl(truth, predictive).mean().item()
        worth = equivalent_samples(kl, curve)
        row: dict[str, Any] = {"kl": kl, "t_eq": worth.value, "t_eq_bound": worth.bound}
        if case.has_classes:
            row["entropy_correlation"] = correlation(entropy(predictive), entropy(truth))
        return row

    plain = torch.cat([_batched(model, x) for model, x in case.members]).double()
    rows = {PLAIN: distance(kind.of_moments(plain, torch.zeros_like(covariance)))}
    rows[PLAIN]["mean_shift"] = ((plain - mean).abs() / std).median().item()
    for tier in TIERS:
        out = [_tier(model, x, tier) for model, x in case.members]
        ours, spread = torch.cat([m for m, _ in out]), torch.cat([c for _, c in out])
        predictive = kind.of_moments(ours, spread)
        rows[tier] = _beside(ours, _std(spread), mean, std) | distance(predictive)
    if case.has_classes:
        with_softmax = [(nn.Sequential(model, nn.Softmax(-1)).eval(), x) for model, x in case.members]
        rows[OWN_SOFTMAX] = distance(torch.cat([_tier(m, x, "paper")[0] for m, x in with_softmax]))
        # moments and truth from the same samples: what remains is the logits' shape alone
        rows[LIMIT] = distance(kind.of_moments(mean, covariance))
    return {
        "inputs": case.n_inputs,
        "outputs": reference.shape[-1],
        "members": len(case.members),
        "reference_samples": len(reference),
        "independent_samples": len(independent),
        "halves_of_reference": halves,
        "kl_of_mc": curve,
        "rows": rows,
    }


def _moments(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased covariance over the samples, for every input."""
    mean = samples.mean(0)
    centred = (samples - mean).movedim(0, -1)
    return mean, centred @ centred.mT / (len(samples) - 1)


def _std(covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1).sqrt()


def _beside(mean: Tensor, std: Tensor, true_mean: Tensor, true_std: Tensor) -> dict[str, Any]:
    quantiles = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    low, median, high = (std / true_std).flatten().quantile(quantiles).tolist()
    return {
        "std_ratio": {"median": median, "p05": low, "p95": high},
        "std_correlation": correlation(std, true_std),
        "mean_shift": ((mean - true_mean).abs() / true_std).median().item(),
    }


def _tier(model: nn.Module, x: Tensor, tier: str) -> tuple[Tensor, Tensor]:
    """Mean and covariance (diagonal where the tier has variances only) of the outputs."""
    out = _batched(mp.convert(model, x[:2], tier), x)
    covariance = torch.diag_embed(out.variance) if out.covariance is None else out.covariance
    return out.mean.double(), covariance.double()


def _batched(model: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        parts = [model(batch) for batch in x.split(BATCH)]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    covariances = [p.covariance for p in parts if p.covariance is not None]
    return mp.Moments(
        torch.cat([p.mean for p in parts]),
        torch.cat([p.variance for p in parts]),
        torch.cat(covariances) if covariances else None,
    )
