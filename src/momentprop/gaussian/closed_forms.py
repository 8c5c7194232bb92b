"""Functions of a Gaussian whose moments are known in closed form.

Each takes mean and variance of X and returns mean and variance of f(X) and the gain E[f'(X)], in forms that
do not cancel where the variance is small and do not overflow before f itself does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import gelu

from momentprop.gaussian.quadrature import expectation

Response = tuple[Tensor, Tensor, Tensor]


def exp_response(mean: Tensor, variance: Tensor) -> Response:
    """E = exp(E + V/2), V = exp(2 E + 2 V) (1 - exp(-V)): the log-normal distribution.

    Where that is more than a number can hold, it is the largest that can be held, as a finite value.
    """
    top = math.log(torch.finfo(mean.dtype).max) - 1
    out = torch.exp((mean + variance / 2).clamp_max(top))
    return out, torch.exp((2 * (mean + variance)).clamp_max(top)) * -torch.expm1(-variance), out


def expm1_response(mean: Tensor, variance: Tensor) -> Response:
    """exp less 1, whose mean cancels near 0 if it is not written with expm1."""
    out, out_variance, gain = exp_response(mean, variance)
    small = torch.expm1((mean + variance / 2).clamp_max(1))
    return torch.where(mean + variance / 2 < 1, small, out - 1), out_variance, gain


def sin_response(mean: Tensor, variance: Tensor) -> Response:
    """E = exp(-V/2) sin E, V = (1 - q) (1 + q cos 2E) / 2 with q = exp(-V)."""
    damped, q = torch.exp(variance * -0.5), torch.exp(-variance)
    spread = torch.expm1(-variance) * (1 + q * torch.cos(2 * mean)) * -0.5
    return damped * torch.sin(mean), spread.clamp_min(0), damped * torch.cos(mean)


def cos_response(mean: Tensor, variance: Tensor) -> Response:
    """E = exp(-V/2) cos E, V = (1 - q) (1 - q cos 2E) / 2 with q = exp(-V)."""
    damped, q = torch.exp(variance * -0.5), torch.exp(-variance)
    spread = torch.expm1(-variance) * (1 - q * torch.cos(2 * mean)) * -0.5
    return damped * torch.cos(mean), spread.clamp_min(0), -damped * torch.sin(mean)


def square_response(mean: Tensor, variance: Tensor) -> Response:
    """E = E^2 + V, V = 4 E^2 V + 2 V^2."""
    square = mean * mean
    return square + variance, variance * (4 * square + 2 * variance), 2 * mean


# Gauss-Legendre nodes on 0..1 and their weights
_ANGLES = (
    (0.019855071751231912, 0.05061426814518821),
    (0.10166676129318664, 0.11119051722668717),
    (0.2372337950418355, 0.15685332293894352),
    (0.4082826787521751, 0.1813418916891809),
    (0.5917173212478248, 0.1813418916891809),
    (0.7627662049581645, 0.15685332293894352),
    (0.8983332387068134, 0.11119051722668717),
    (0.9801449282487682, 0.05061426814518821),
)


def erf_response(mean: Tensor, variance: Tensor) -> Response:
    """With D = 1 + 2 V: E = erf(E / sqrt(D)), gain = 2 / sqrt(pi D) exp(-E^2 / D), and

        V = 2 / pi * integral of exp(-2 E^2 / (D (1 + sin t))) dt, t from 0 to asin(2 V / D).

    The last is Var[f(X)] = V * integral of E[f'(X) f'(Y)] over the correlation of X and Y from 0 to 1, with
    sin t for the correlation of what is left of them; 8 points give it to 1e-6.
    """
    inverse = 1 / (1 + 2 * variance)
    u = (mean * inverse.sqrt()).clamp(-1e3, 1e3)
    square = u * u
    angle = torch.atan(2 * variance / (1 + 4 * variance).sqrt())
    total = torch.zeros_like(mean)
    for share, weight in _ANGLES:
        total = torch.add(total, torch.exp(square * -2 / (1 + torch.sin(angle * share))), alpha=weight)
    gain = inverse.sqrt() * torch.exp(-square) * (2 / math.sqrt(math.pi))
    return torch.erf(u), angle * total * (2 / math.pi), gain


def gelu_response(mean: Tensor, variance: Tensor, approximate: str = "none") -> Response:
    """x Phi(x): with u = E / sqrt(1 + V), E = E Phi(u) + V / sqrt(1 + V) phi(u).

    The gain is Phi(u) + phi(u) u / (1 + V); the variance is by quadrature, as is all of the tanh form.
    """
    found = expectation(lambda x: gelu(x, approximate=approximate), mean, variance)
    if approximate != "none":
        return found
    inverse = 1 / (1 + variance)
    root = inverse.sqrt()
    u = (mean * root).clamp(-1e3, 1e3)
    density = torch.exp(u * u * -0.5) * (1 / math.sqrt(2 * math.pi))
    below = 0.5 * torch.erfc(u * -math.sqrt(0.5))
    return mean * below + variance * root * density, found[1], below + density * u * inverse
