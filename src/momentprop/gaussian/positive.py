"""Logarithms and powers of quantities that are positive: log, sqrt, rsqrt, reciprocal.

A Gaussian gives some probability to values below zero, where these functions are not defined. So here X is
log-normal with the given mean m and variance: log X is normal with variance s^2 = log(1 + V / m^2) and mean
log m - s^2 / 2. Then, with q = V / m^2,

    E[X^p] = m^p (1 + q)^(p (p - 1) / 2),    Var[X^p] = E[X^p]^2 ((1 + q)^(p^2) - 1),

exactly. The gain is the regression coefficient Cov(f(X), X) / V, which for Gaussian X is E[f'(X)]. To first
order in q all this agrees with any other distribution on the positive numbers.

Means at or below zero, which no positive quantity has, count as the smallest mean that can be divided by;
and q counts as at most 100: beyond, two moments say nothing. A reciprocal may as well be that of a
negative quantity.
"""

from __future__ import annotations

import torch
from torch import Tensor

Response = tuple[Tensor, Tensor, Tensor]

_LARGEST_RATIO = 100.0


def log_response(mean: Tensor, variance: Tensor) -> Response:
    """E = log m - s^2 / 2, V = s^2, Cov(log X, X) = m s^2."""
    m, q = _positive(mean, variance)
    s2, q_safe = torch.log1p(q), _not_zero(q)
    return torch.log(m) - s2 / 2, s2, torch.log1p(q_safe) / (q_safe * m)


def log1p_response(mean: Tensor, variance: Tensor) -> Response:
    """The logarithm of 1 + X, which is what is positive."""
    m, q = _positive(mean + 1, variance)
    s2, q_safe = torch.log1p(q), _not_zero(q)
    value = torch.where(mean > -0.5, torch.log1p(mean.clamp_min(-0.5)), torch.log(m))
    return value - s2 / 2, s2, torch.log1p(q_safe) / (q_safe * m)


def power_response(mean: Tensor, variance: Tensor, exponent: float) -> Response:
    """X^p, as above; Cov(X^p, X) = m E[X^p] ((1 + q)^p - 1)."""
    m, q = _positive(mean, variance)
    s2, q_safe = torch.log1p(q), _not_zero(q)
    out = torch.pow(m, exponent) * torch.exp(s2 * (exponent * (exponent - 1) / 2))
    gain = out * torch.expm1(torch.log1p(q_safe) * exponent) / (q_safe * m)
    if exponent > 0:
        out = out * (mean.clamp_min(0) / m).clamp_max(1)  # 0 at 0
    return out, out * out * torch.expm1(s2 * exponent**2), gain


def sqrt_response(mean: Tensor, variance: Tensor) -> Response:
    return power_response(mean, variance, 0.5)


def rsqrt_response(mean: Tensor, variance: Tensor) -> Response:
    return power_response(mean, variance, -0.5)


def reciprocal_response(mean: Tensor, variance: Tensor) -> Response:
    """1 / X, of a quantity that has the sign of its mean."""
    sign = torch.where(mean < 0, -1.0, 1.0).to(mean.dtype)
    out, out_variance, gain = power_response(mean * sign, variance, -1)
    return out * sign, out_variance, gain


def _positive(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """m and q."""
    m = mean.clamp_min(torch.finfo(mean.dtype).tiny ** 0.25)
    square = m * m
    return m, torch.minimum(variance, square * _LARGEST_RATIO) / square


def _not_zero(q: Tensor) -> Tensor:
    """q, or something small, at which quotients by it have reached their limit."""
    return q.clamp_min(torch.finfo(q.dtype).eps)
