"""E[f(X)], Var[f(X)] and E[f'(X)] of any function f of a Gaussian X, from f alone.

Gauss-Hermite quadrature: a weighted mean over a few fixed points x_i = E + z_i std. It is exact for
polynomials, and converges fast for functions that are smooth on the scale of std. The gain needs no
derivative of f, since by Stein's lemma E[f'(X)] = E[(X - E) f(X)] / V.

Points come in pairs E +- z std, and f is split around its value at E into an odd and an even part,

    odd = (f(E + z std) - f(E - z std)) / 2,    even = (f(E + z std) + f(E - z std)) / 2 - f(E),

whose products average out. So nothing cancels where std is small, and V = 0 gives f(E) to the last digit.
Where std is so small that rounding would drown the differences, the points keep a distance tau > std, and the
sums are scaled back: the odd part by std / tau, the even part by its square, as a Taylor expansion says.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Nodes = tuple[tuple[float, float], ...]


def gauss_hermite(n: int) -> Nodes:
    """The (z, weight) of the n-point rule with z > 0; -z has the same weight. n is odd: 0 is a node."""
    if n < 3 or n % 2 == 0:
        raise ValueError(f"the number of nodes must be odd and at least 3, not {n}")
    found: list[tuple[float, float]] = []
    z = 2 * math.sqrt(n)  # right of the largest root
    for _ in range(n // 2):
        # Newton's method, with the roots known already divided out, descends to the next one
        for _ in range(200):
            value, slope = _hermite(n, z)
            known = sum(1 / (z - root) + 1 / (z + root) for root, _ in found) + 1 / z
            step = value / (slope - value * known)
            z -= step
            if abs(step) < 1e-15 * z:
                break
        found.append((z, 1 / _hermite(n, z)[1] ** 2))
        z *= 1 - 1e-6
    return tuple(reversed(found))


def _hermite(n: int, z: float) -> tuple[float, float]:
    """The orthonormal Hermite polynomial of degree n at z, and its derivative; its weights are slope^-2."""
    before, value = 0.0, 1.0
    for k in range(n):
        before, value = value, (z * value - math.sqrt(k) * before) / math.sqrt(k + 1)
    return value, math.sqrt(n) * before


NODES = gauss_hermite(13)


def expectation(
    f: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor, nodes: Nodes = NODES
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of f(X) for X ~ N(mean, variance), and the gain E[f'(X)].

    f acts element by element and must be finite around the mean, also where the variance is zero.

    >>> mean, variance = torch.tensor([2.0]), torch.tensor([0.25])
    >>> [round(t.item(), 4) for t in expectation(torch.square, mean, variance)]
    [4.25, 4.125, 4.0]
    """
    eps = torch.finfo(mean.dtype).eps
    # the distance at which rounding, eps |x| / tau, and the next term of the expansion, tau^2, balance
    least = mean.abs().clamp_min(1).pow(2 / 3) * eps ** (2 / 3)
    square = torch.maximum(variance, least)
    tau, ratio = square.sqrt(), variance / square
    center = f(mean)
    shift = even_square = odd_square = slope = torch.zeros_like(center)
    for z, weight in nodes:
        above = f(torch.add(mean, tau, alpha=z)) - center
        below = f(torch.sub(mean, tau, alpha=z)) - center
        even, odd = above + below, above - below
        shift = torch.add(shift, even, alpha=weight)
        slope = torch.add(slope, odd, alpha=weight * z)
        even_square = torch.addcmul(even_square, even, even, value=weight / 2)
        odd_square = torch.addcmul(odd_square, odd, odd, value=weight / 2)
    spread = (even_square - shift * shift).clamp_min(0)
    return center + ratio * shift, ratio * (odd_square + ratio * spread), slope / tau
