"""tanh and sigmoid of a Gaussian.

The logistic function is a mixture of normal distribution functions, sigmoid(x) = sum of w Phi(s x), and each
of those has a Gaussian mean in closed form, E[Phi(s X)] = Phi(r E) with r = s / sqrt(1 + s^2 V). Since
sigmoid(x) = (1 + tanh(x / 2)) / 2, and Phi and erf are related in the same way, the mean and the gain of tanh
are sums over erf and its derivative; and since tanh' = 1 - tanh^2, the variance follows from these two:

    V_out = 1 - gain - mean^2.

That cancels where the variance is small; there quadrature is exact to all digits that matter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from momentprop.gaussian.quadrature import expectation, gauss_hermite

# (w, s), to 3e-9: fitted by least squares on 0..45 (Monahan & Stefanski 1992)
_MIXTURE = (
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
    for weight, s in _MIXTURE:
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
