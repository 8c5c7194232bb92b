"""The maximum of dropped values, against the enumeration of all masks and against sampling."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from momentprop.gaussian.dropped_maximum import dropped_maximum
from properties import Samples

PROBABILITIES = [0.05, 0.3, 0.5, 0.9]


def enumerated(x: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of the maximum over the first dimension, and its response to every mask."""
    masks = torch.tensor(list(itertools.product([0.0, 1.0], repeat=len(x))), dtype=x.dtype)
    kept = masks.sum(1)
    chances = ((1 - p) ** kept * p ** (len(x) - kept))[:, None]
    values = (masks[:, :, None] * x / (1 - p)).amax(1)
    mean = (chances * values).sum(0)
    variance = (chances * (values - mean) ** 2).sum(0)
    weights = chances * (masks / (1 - p) - (1 - masks) / p)
    return mean, variance, weights.T @ values


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_known_values_are_exact(n: int, p: float) -> None:
    """Values of both signs, some of them equal; all negative; all zero."""
    x = torch.randn(n, 50, dtype=torch.float64).mul(2).round() / 2
    x[:, :10], x[:, 10:12] = -x[:, :10].abs() - 0.1, 0
    mean, variance, response = enumerated(x, p)
    found = dropped_maximum(x, None, p)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.variance, variance)
    responses, gains = found.linear()
    assert gains is None
    # of equal values it does not matter whose mask the maximum responds to
    alone = torch.stack([(x == row).sum(0) == 1 for row in x])
    torch.testing.assert_close(responses[alone], response[alone])
    assert (p * (1 - p) * responses.square().sum(0) <= variance + 1e-12).all()


@pytest.mark.parametrize("p", PROBABILITIES)
def test_elements_that_are_not_there(p: float) -> None:
    x = torch.randn(4, 50, dtype=torch.float64)
    x[1, :10], x[:3, 10:20] = -1e300, -1e300
    rest = [x[[0, 2, 3], :10], x[3:, 10:20], x[:, 20:]]
    for variance in (None, torch.rand_like(x)):
        found = dropped_maximum(x, variance, p, absent=-1e299)
        parts = [] if variance is None else [variance[[0, 2, 3], :10], variance[3:, 10:20], variance[:, 20:]]
        for i, part in enumerate(rest):
            other = dropped_maximum(part, parts[i] if parts else None, p)
            at = slice(10 * i, 10 * i + part.shape[1])
            tolerance = (
                {"rtol": 1e-9, "atol": 1e-9} if variance is None or i else {"rtol": 0.15, "atol": 0.05}
            )
            torch.testing.assert_close(found.mean[at], other.mean, **tolerance)
            torch.testing.assert_close(found.variance[at], other.variance, **tolerance)
        for weights in found.linear():
            assert weights is None or not weights[1, :10].any()


def test_many_known_values() -> None:
    """All beyond the largest are dropped so rarely together that the next one counts as kept."""
    x = torch.randn(200, 30, dtype=torch.float64)
    found, p = dropped_maximum(x, None, 0.5), 0.5
    values = x.sort(0, descending=True).values[:60].relu() / 0.5
    chances = torch.tensor([0.5 * p**k for k in range(60)], dtype=torch.float64)[:, None]
    torch.testing.assert_close(found.mean, (chances * values).sum(0), rtol=1e-6, atol=1e-6)
    second = (chances * values**2).sum(0)
    torch.testing.assert_close(found.variance, second - found.mean**2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("scale", [0.1, 0.5, 1.5])
@pytest.mark.parametrize("n", [2, 4, 9, 36])
def test_random_values_agree_with_sampling(n: int, scale: float, p: float) -> None:
    """The bounds of the documentation, beyond five standard errors."""
    torch.manual_seed(0)
    x = torch.randn(n, 40, dtype=torch.float64)
    std = scale * (0.5 + torch.rand_like(x))
    found = dropped_maximum(x, std**2, p)
    values = x + std * torch.randn(10_000, *x.shape, dtype=x.dtype)
    values *= (torch.rand_like(values) >= p) / (1 - p)
    sampled = Samples(values.amax(1))
    error = (found.mean - sampled.mean).abs() - 5 * sampled.mean_error
    assert (error <= 0.1 * sampled.variance.sqrt()).all()
    assert (error / sampled.variance.sqrt()).median() <= 0.02
    error = (found.variance - sampled.variance).abs() - 5 * sampled.variance_error
    assert (error <= (0.02 if n == 2 else 0.3) * sampled.variance).all()


@pytest.mark.parametrize("correlation", [0.5, 0.9])
def test_correlated_values_agree_with_sampling(correlation: float) -> None:
    torch.manual_seed(0)
    x, p = torch.randn(4, 40, dtype=torch.float64), 0.2
    common = correlation**0.5 * torch.randn(20_000, 1, 40, dtype=x.dtype)
    values = x + common + (1 - correlation) ** 0.5 * torch.randn(20_000, *x.shape, dtype=x.dtype)
    values *= (torch.rand_like(values) >= p) / (1 - p)
    sampled, found = Samples(values.amax(1)), dropped_maximum(x, torch.ones_like(x), p, correlation)
    assert ((found.mean - sampled.mean).abs() <= 0.05 * sampled.variance.sqrt()).all()
    torch.testing.assert_close(found.variance, sampled.variance, rtol=0.1, atol=0)


@pytest.mark.parametrize("n", [4, 24])
def test_gain_is_nearly_the_derivative_of_the_mean(n: int) -> None:
    """The gain is what remains of the derivative if a maximum so far moves as a Gaussian does."""
    x = torch.randn(n, 50, dtype=torch.float64, requires_grad=True)
    found = dropped_maximum(x, torch.rand_like(x), 0.3)
    (derivative,) = torch.autograd.grad(found.mean.sum(), x)
    _, gains = found.linear()
    assert (gains - derivative).abs().mean() < 0.05
    assert (gains - derivative).abs().max() < 0.25
    torch.testing.assert_close(gains.sum(0), derivative.sum(0), rtol=0.2, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 1e12])
@pytest.mark.parametrize("p", [1e-6, 0.5, 1 - 1e-6])
def test_extremes(p: float, scale: float, dtype: torch.dtype) -> None:
    for n, spread in itertools.product((1, 4, 40), (0.0, 1e-12, 1.0, 1e6)):
        x = torch.randn(n, 20, dtype=dtype) * scale
        x.requires_grad_()
        for variance in (None, torch.rand(n, 20, dtype=dtype) * spread):
            found = dropped_maximum(x, variance, p)
            responses, gains = found.linear()
            parts = [found.mean, found.variance, responses, *([] if gains is None else [gains])]
            assert all(t.isfinite().all() for t in parts)
            assert (found.variance >= 0).all()
            (gradient,) = torch.autograd.grad(found.mean.sum() + found.variance.sum(), x)
            assert gradient.isfinite().all()


@pytest.mark.parametrize("p", [0.01, 0.5])
def test_single_precision_is_near_double(p: float) -> None:
    x = torch.randn(9, 100, dtype=torch.float64)
    for variance in (None, torch.rand_like(x)):
        high = dropped_maximum(x, variance, p)
        low = dropped_maximum(x.float(), None if variance is None else variance.float(), p)
        torch.testing.assert_close(low.mean.double(), high.mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(low.variance.double(), high.variance, rtol=1e-4, atol=1e-5)
