"""benchmarks/predictive_formulas.py: what the literature prints, and the limits of floating point."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from momentprop.gaussian.logits import Averages, GaussianLogits
from scripts import script

with script("benchmarks/predictive_formulas.py") as formulas:
    FORMULAS: dict[str, Callable[[GaussianLogits], Averages]] = formulas.FORMULAS


def test_probit() -> None:
    mean, variance = torch.randn(4, 3).double(), torch.rand(4, 3).double() + 0.1
    expected = (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)
    found = FORMULAS["probit"](GaussianLogits(mean, variance))
    torch.testing.assert_close(found.log_probs.exp(), expected)


def test_laplace_bridge_is_a_dirichlet_distribution() -> None:
    mean, variance = torch.randn(4, 3).double(), torch.rand(4, 3).double() + 0.1
    found = FORMULAS["laplace_bridge"](GaussianLogits(mean, variance))
    alpha = (1 - 2 / 3 + mean.exp() / 9 * (-mean).exp().sum(-1, keepdim=True)) / variance
    torch.testing.assert_close(found.log_probs.exp(), alpha / alpha.sum(-1, keepdim=True))
    dirichlet = torch.distributions.Dirichlet(alpha)
    assert found.second is not None
    assert found.entropy is not None
    torch.testing.assert_close(found.second - found.log_probs.exp().square(), dirichlet.variance)
    samples = dirichlet.sample((200_000,))
    torch.testing.assert_close(found.entropy, torch.special.entr(samples).sum(-1).mean(0), rtol=5e-3, atol=0)


@pytest.mark.parametrize("correlated", [False, True])
def test_mean_field(correlated: bool) -> None:
    a = torch.randn(4, 3, 3).double()
    mean, covariance = torch.randn(4, 3).double(), a @ a.mT
    variance = covariance.diagonal(dim1=1, dim2=2)
    found = FORMULAS["mean_field"](GaussianLogits(mean, variance, covariance if correlated else None))
    for i in range(4):
        p = [
            1
            / sum(
                1 if j == k else math.exp(-_scaled(mean[i], covariance[i], k, j, correlated))
                for j in range(3)
            )
            for k in range(3)
        ]
        expected = torch.tensor(p, dtype=torch.float64) / sum(p)
        torch.testing.assert_close(found.log_probs[i].exp(), expected)


def _scaled(mean: torch.Tensor, covariance: torch.Tensor, k: int, j: int, correlated: bool) -> float:
    variance = covariance[k, k] + covariance[j, j] - 2 * covariance[k, j] * correlated
    return float((mean[k] - mean[j]) / (1 + math.pi / 8 * variance).sqrt())


def test_mean_field_of_chosen_classes_leaves_the_others_independent() -> None:
    a = torch.randn(1, 3, 3)
    part, chosen, mean = a @ a.mT, torch.tensor([[4, 1, 2]]), torch.randn(1, 6)
    full = torch.diag_embed(torch.rand(1, 6))
    full[0, chosen[0][:, None], chosen[0]] = part[0]
    variance = full.diagonal(dim1=1, dim2=2)
    found = FORMULAS["mean_field"](GaussianLogits(mean, variance, part, chosen))
    same = FORMULAS["mean_field"](GaussianLogits(mean, variance, full))
    torch.testing.assert_close(found.log_probs.exp(), same.log_probs.exp(), rtol=0, atol=3e-3)


@pytest.mark.parametrize("name", ["probit", "mean_field"])
@pytest.mark.parametrize("n_classes", [2, 3, 40])
def test_softmax_itself_at_variance_zero(name: str, n_classes: int) -> None:
    mean, zero = torch.randn(5, n_classes) * 3, torch.zeros(5, n_classes)
    found = FORMULAS[name](GaussianLogits(mean, zero, torch.diag_embed(zero)))
    torch.testing.assert_close(found.log_probs, mean.log_softmax(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("n_classes", [2, 10, 100])
def test_nothing_is_nan(name: str, n_classes: int) -> None:
    """E within +-1e3, V up to 1e6, float32; probabilities sum to one."""
    n = {2: 20_000, 10: 10_000, 100: 400}[n_classes]
    mean = (torch.rand(n, n_classes) * 2 - 1) * 10 ** (torch.rand(n, 1) * 6 - 3)
    variance = 10 ** (torch.rand(n, n_classes) * 12 - 6)
    variance[::7] = 0
    found = FORMULAS[name](GaussianLogits(mean, variance))
    assert found.log_probs.isfinite().all()
    assert (found.log_probs <= 1e-4).all()
    torch.testing.assert_close(found.log_probs.exp().sum(-1), torch.ones(n), rtol=1e-4, atol=1e-4)
    if found.second is not None and found.entropy is not None:
        assert found.second.isfinite().all()
        assert (found.entropy >= -1e-4).all()
        assert (found.entropy <= math.log(n_classes) + 1e-3).all()
