"""tanh and sigmoid of a Gaussian.

The logistic function is a mixture of normal distribution functions, sigmoid(x) = sum of w Phi(s x), and each
of those has a Gaussian mean in closed form, E[Phi(s X)] = Phi(r E) with r = s / sqrt(1 + s^2 V). Since
sigmoid(x) = (1 + tanh(x / 2)) / 2, and Phi and erf are related in the same way, the mean and the gain of tanh
are sums over erf and its derivative; and since tanh' = 1 - tanh^2, the variance follows from these two:

    V_out = 1 - gain - mean^2.

That cancels where the variance is small; there quadrature is exact to all digits that matter.

Two sigmoids of jointly normal variables with correlation r have the covariance sum over n of r^n a_n b_n,
with the Hermite coefficients a_n = E[f(E + std Z) He_n(Z)] / sqrt(n!) of each (Mehler). `Series` holds the
first two; the sum of a_n^2 is the variance, and what these two leave of it counts as the third, so that r = 1
is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from momentprop.gaussian.normal import safe_sqrt
from momentprop.gaussian.quadrature import expectation, gauss_hermite

# (w, s), to 3e-9: fitted by least squares on 0..45 (Monahan & Stefanski 1992)
MIXTURE = (
    (0.00156311389013884, 0.2392959859687245),
    (0.029389965772466463, 0.3106694870235198),
    (0.13446467003100238, 0.39874405298081667),
    (0.2744579600920082, 0.5107087220770474),
    (0.31213070631058026, 0.6525718843822339),
    (0.19338077259720304, 0.8315885925716114),
    (0.05137911362046055, 1.0597646956637643),
    (0.003233697686140237, 1.3658156267508992),
)
_NODES = gauss_hermite(11)
_SMALL_VARIANCE = 0.12  # of tanh's argument
_FAR = 40.0  # where erf is 1, its derivative 0, and a square far from overflow


def tanh_response(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and gain of tanh(X)."""
    near = expectation(torch.tanh, mean, variance, _NODES)
    return _joined(variance < _SMALL_VARIANCE, near, _mixture(mean, variance))


def sigmoid_response(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and gain of sigmoid(X)."""
    near = expectation(torch.sigmoid, mean, variance, _NODES)
    e, v, g = _mixture(mean * 0.5, variance * 0.25)
    return _joined(variance < 4 * _SMALL_VARIANCE, near, (e * 0.5 + 0.5, v * 0.25, g * 0.25))


def _mixture(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and gain of tanh(X) where the variance is not small."""
    value = slope = torch.zeros_like(mean)
    for weight, s in MIXTURE:
        r = (0.5 / (s * s) + 2 * variance).rsqrt()
        u = (r * mean).clamp(-_FAR, _FAR)
        value = torch.add(value, torch.erf(u), alpha=weight)
        slope = torch.addcmul(slope, r, torch.exp(-u * u), value=weight * 2 / math.sqrt(math.pi))
    value = value.clamp(-1, 1)
    return value, (1 - value * value - slope).clamp_min(0), slope


def _joined(
    small: Tensor, near: tuple[Tensor, Tensor, Tensor], wide: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance, gain = [torch.where(small, a, b) for a, b in zip(near, wide, strict=True)]
    return mean, variance, gain


# Of a trapezoidal rule, exact to 5e-5 for std 6, since sigmoid has a pole at i pi.
_POINTS = tuple(i / 3 for i in range(-24, 25))
_WEIGHTS = tuple(math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / 3 for z in _POINTS)  # they sum to 1
_LEAST_STD, _MOST_STD = 0.02, 6.0
_AT_ONCE = 2**14  # elements whose points fit into caches


@dataclass(frozen=True)
class Series:
    """Mean and variance of sigmoid(X), to relative precision in both tails, and shares of its std.

    `first` and `second` are the Hermite coefficients over the standard deviation.
    """

    mean: Tensor
    variance: Tensor
    first: Tensor
    second: Tensor

    @property
    def third(self) -> Tensor:
        """What the first two leave of the variance, as a coefficient."""
        return safe_sqrt((1 - self.first.square() - self.second.square()).clamp_min(0))


def sigmoid_series(mean: Tensor, variance: Tensor) -> Series:
    """Sum over evenly spaced points of a Gaussian, on the side where sigmoid is small."""
    if not torch.compiler.is_compiling() and mean.numel() > _AT_ONCE:
        flat = zip(mean.flatten().split(_AT_ONCE), variance.flatten().split(_AT_ONCE), strict=True)
        parts = [_series(m, v) for m, v in flat]
        return Series(*[torch.cat(values).reshape(mean.shape) for values in zip(*parts, strict=True)])
    return Series(*_series(mean, variance))


def _series(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    std, side = safe_sqrt(variance), torch.where(mean > 0, -1.0, 1.0)
    far = std.clamp_min(_LEAST_STD)  # or rounding would drown the differences; brought back to first order
    back = (std / far).square() * (variance > 0)
    below = mean * side
    points, weights = (torch.tensor(v, dtype=mean.dtype, device=mean.device) for v in (_POINTS, _WEIGHTS))
    center = torch.sigmoid(below)
    away = torch.sigmoid(below[..., None] + far[..., None] * points) - center[..., None]
    shift = (away * weights).sum(-1)
    away = away - shift[..., None]
    near = (away.square() * weights).sum(-1)
    scale = safe_sqrt(near).reciprocal()
    first = (away * (weights * points)).sum(-1) * scale
    second = (away * (weights * (points.square() - 1))).sum(-1) * scale * (side * math.sqrt(0.5))
    small = center + back * shift
    # points further apart than sigmoid is wide would miss it
    wide_mean, wide_variance, _ = sigmoid_response(mean, variance)
    out = torch.where(std > _MOST_STD, wide_mean, torch.where(mean > 0, 1 - small, small))
    return out, torch.where(std > _MOST_STD, wide_variance, back * near), first, second
