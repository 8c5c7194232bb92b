"""Softmax of Gaussian logits, against large samples, and at the limits of floating point."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from momentprop.gaussian.logits import GaussianLogits, _factor, integrate
from momentprop.predict.classification import METHODS

SAMPLES = 10**6


def sampled(mean: Tensor, covariance: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and second moment of softmax, and its mean entropy, over normal logits."""
    generator = torch.Generator().manual_seed(seed)
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp_min(0).sqrt()).float()
    first, second, entropy = torch.zeros_like(mean), torch.zeros_like(mean), 0.0
    for _ in range(20):
        noise = torch.randn(SAMPLES // 40, len(mean), generator=generator) @ root.T
        for z in (mean.float() + noise, mean.float() - noise):
            log_p = z.log_softmax(-1)
            p = log_p.exp()
            first, second = first + p.sum(0), second + p.square().sum(0)
            entropy = entropy - (p * log_p).sum().double()
    return first / SAMPLES, second / SAMPLES, entropy / SAMPLES


def random_logits(n_classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Means and covariances of very different sizes, with a part common to all classes."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(n_classes, generator=generator, dtype=torch.float64) * (0.5, 1.0, 3.0)[seed % 3]
    a = torch.randn(n_classes, n_classes, generator=generator, dtype=torch.float64) / math.sqrt(n_classes)
    own = torch.rand(n_classes, generator=generator, dtype=torch.float64)
    scale = (0.3, 1.0, 3.0)[seed // 3 % 3]
    return mean, scale**2 * (0.5 * a @ a.T + 0.5 * torch.diag(own) + 0.3)


def gaussian(mean: Tensor, covariance: Tensor, dtype: torch.dtype = torch.float32) -> GaussianLogits:
    mean, covariance = mean[None].to(dtype), covariance[None].to(dtype)
    return GaussianLogits(mean, covariance.diagonal(dim1=1, dim2=2), covariance)


@pytest.mark.parametrize("n_classes", [2, 5, 10, 100])
def test_integral_agrees_with_a_million_samples(n_classes: int) -> None:
    """Largest error of a probability 3e-3, mean 5e-4; second moments and entropy alike."""
    errors, seconds, entropies = [], [], []
    for seed in {2: range(9), 5: range(9), 10: range(2, 9), 100: (2, 4)}[n_classes]:
        mean, covariance = random_logits(n_classes, seed)
        first, second, entropy = sampled(mean, covariance)
        out = integrate(gaussian(mean, covariance))
        assert out.second is not None
        assert out.entropy is not None
        errors.append((out.log_probs.exp()[0] - first).abs())
        seconds.append((out.second[0] - second).abs())
        entropies.append((out.entropy[0] - entropy).abs())
    assert torch.cat(errors).max() <= 3e-3
    assert torch.cat(errors).mean() <= 5e-4
    assert torch.cat(seconds).max() <= 4e-3
    assert torch.stack(entropies).max() <= 0.01


def test_independent_logits_and_chosen_ones() -> None:
    mean, covariance = random_logits(6, 4)
    variance = covariance.diagonal()[None]
    independent = integrate(GaussianLogits(mean[None], variance))
    first, _, _ = sampled(mean, torch.diag(variance[0]))
    assert (independent.log_probs.exp()[0] - first).abs().max() < 3e-3
    chosen = torch.tensor([[4, 1, 2]])
    part = covariance[chosen[0]][:, chosen[0]]
    full = torch.diag(variance[0])
    full[chosen[0][:, None], chosen[0]] = part
    first, _, _ = sampled(mean, full)
    out = integrate(GaussianLogits(mean[None], variance, part[None], chosen)).log_probs.exp()
    same = integrate(GaussianLogits(mean[None], variance, full[None])).log_probs.exp()
    assert (out - same).abs().max() < 3e-3
    assert (out[0] - first).abs().max() < 3e-3


@pytest.mark.parametrize("n_classes", [2, 3, 40])
def test_softmax_itself_at_variance_zero(n_classes: int) -> None:
    mean = torch.randn(5, n_classes) * 3
    zero = torch.zeros(5, n_classes)
    out = integrate(GaussianLogits(mean, zero, torch.diag_embed(zero)))
    torch.testing.assert_close(out.log_probs, mean.log_softmax(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.second, mean.softmax(-1).square(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out.entropy, torch.special.entr(mean.softmax(-1)).sum(-1))


def test_what_all_logits_share_does_not_matter() -> None:
    mean, covariance = random_logits(5, 1)
    alone = integrate(gaussian(mean, covariance, torch.float64)).log_probs
    shared = integrate(gaussian(mean + 7, covariance + 25, torch.float64)).log_probs
    torch.testing.assert_close(shared, alone, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_classes", [2, 10, 100])
def test_nothing_is_nan(method: str, n_classes: int) -> None:
    """E within +-1e3, V up to 1e6, float32; probabilities sum to one."""
    generator = torch.Generator().manual_seed(0)
    n = (
        {2: 20_000, 10: 10_000, 100: 400}[n_classes]
        if method != "integrate"
        else {2: 20_000, 10: 2_000, 100: 100}[n_classes]
    )
    mean = (torch.rand(n, n_classes, generator=generator) * 2 - 1) * 10 ** (
        torch.rand(n, 1, generator=generator) * 6 - 3
    )
    variance = 10 ** (torch.rand(n, n_classes, generator=generator) * 12 - 6)
    variance[::7] = 0
    out = METHODS[method](GaussianLogits(mean, variance))
    assert out.log_probs.isfinite().all()
    assert (out.log_probs <= 1e-4).all()
    torch.testing.assert_close(out.log_probs.exp().sum(-1), torch.ones(n), rtol=1e-4, atol=1e-4)
    if out.second is not None and out.entropy is not None:
        assert out.second.isfinite().all()
        assert (out.entropy >= -1e-4).all()
        assert (out.entropy <= math.log(n_classes) + 1e-3).all()


def test_large_numbers_of_classes_run_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, variance = torch.randn(2, 8, 1000)
    whole = integrate(GaussianLogits(mean, variance.exp()))
    monkeypatch.setattr("momentprop.gaussian.logits._AT_ONCE", 2**15)
    blocks = integrate(GaussianLogits(mean, variance.exp()))
    torch.testing.assert_close(blocks.log_probs, whole.log_probs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(blocks.entropy, whole.entropy, rtol=1e-4, atol=1e-4)


def test_factor_of_singular_covariances() -> None:
    a = torch.randn(4, 6, 3, dtype=torch.float64)
    covariance = a @ a.mT
    covariance[0] = 0
    factor = _factor(covariance)
    torch.testing.assert_close(factor @ factor.mT, covariance, rtol=1e-6, atol=1e-7)
    assert (factor.triu(1) == 0).all()


def test_the_papers_formula_is_daunizeaus() -> None:
    mean, variance = torch.randn(4, 3).double(), torch.rand(4, 3).double() + 0.1
    phi = torch.distributions.Normal(0, 1).cdf
    difference = mean[:, :, None] - mean[:, None, :]
    spread = variance[:, :, None] + variance[:, None, :]
    inverse = 1 / phi(difference / (spread + 8 / math.pi).sqrt())
    others = inverse.sum(-1) - inverse.diagonal(dim1=1, dim2=2)
    daunizeau = 1 / (2 - 3 + others)
    found = METHODS["paper"](GaussianLogits(mean, variance)).log_probs.exp()
    torch.testing.assert_close(found, daunizeau / daunizeau.sum(-1, keepdim=True))
