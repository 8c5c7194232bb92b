"""Functions of the normal distribution without cancellation, in both tails, in float32 and float64.

Everything rests on one function of a >= 0. With phi the normal density, Z a standard normal and
E[(Z - a)+^n] the partial moments of its upper tail, define them relative to phi:

    M(a) = P(Z > a) / phi(a)          (Mills' ratio)       ~ 1/a
    G(a) = E[(Z - a)+]   / phi(a)  =  1 - a M              ~ 1/a^2
    H(a) = E[(Z - a)+^2] / phi(a)  =  (1 + a^2) M - a      ~ 2/a^3

Computed from M by these formulas, G and H lose all digits in the tail (H = 2/a^3 is what two terms of
size a leave). The other way round nothing cancels: with H at hand,

    G = (1 - a H) / (1 + a^2),    M = H + a G,

where 0 <= a H < 0.32. So one polynomial for H serves all three: H = t^3 R(t), t = 1/(1 + a/s), which
is smooth on 0 <= t <= 1. R interpolates at Chebyshev nodes; its relative error is below 1.3e-6 for
float32 (degree 10, s = 3) and below 3e-15 for float64 (degree 24, s = 5). Only +, *, /, sqrt and exp
are used, so every runtime that can run a network can run this.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Highest power first; the scale s stands beside each table.
_FLOAT32 = (
    3.0,
    (
        0.6062272756902695,
        -3.167018028551732,
        6.499855711893859,
        -6.228474746044924,
        2.538513213104206,
        -0.7352034092464115,
        0.5708643579837089,
        0.476187312327746,
        0.3960905082152879,
        0.2221979168394611,
        0.07407417334594762,
    ),
)
_FLOAT64 = (
    5.0,
    (
        0.0068069968157338295,
        -0.05244888657245115,
        0.10779682437794394,
        0.3323682535809716,
        -2.5712735523287633,
        7.61548141190961,
        -14.000205305229144,
        17.979074409908318,
        -17.139541870815318,
        12.62771935883035,
        -7.29304945634429,
        3.312978734815481,
        -1.2573748273118965,
        0.33610991795901995,
        -0.06302890557983565,
        0.09118559902841124,
        0.1342471634053054,
        0.18528321374730705,
        0.2110080969698986,
        0.20966499659433016,
        0.18355196270940455,
        0.14080000085546376,
        0.09215999998960313,
        0.048000000000050155,
        0.01599999999999996,
    ),
)

# Beyond 60 standard deviations every tail is exactly 0 in float64 too; a^2 stays far from overflow.
_FAR = 60.0
_ROOT_PHI_0 = (2 * math.pi) ** -0.25  # sqrt(phi(0))


def _tail_ratios(a: Tensor) -> tuple[Tensor, Tensor]:
    """(G, H) for a >= 0."""
    scale, coefficients = _FLOAT64 if a.dtype == torch.float64 else _FLOAT32
    t = 1 / (1 + a * (1 / scale))
    polynomial = t * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        polynomial = polynomial * t + coefficient
    h = t * t * t * polynomial
    return (1 - a * h) / (1 + a * a), h


def _root_density(a: Tensor) -> Tensor:
    """sqrt(phi(a)). As a factor applied twice it reaches twice as far before it underflows."""
    return torch.exp(a * a * -0.25) * _ROOT_PHI_0


def safe_sqrt(variance: Tensor) -> Tensor:
    """sqrt, with a floor that keeps its gradient, and quotients by it, finite at zero variance.

    The floor is about 5e-31 in float32 and 5e-247 in float64, below any variance that matters.
    """
    return variance.clamp_min(torch.finfo(variance.dtype).tiny ** 0.8).sqrt()


def tail_moments(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """P(Z > a), E[(Z - a)+], E[(Z - a)+^2] and phi(a) for a >= 0, and a itself, bounded."""
    a = a.clamp_max(_FAR)
    g_ratio, h_ratio = _tail_ratios(a)
    q = _root_density(a)
    density = q * q
    return q * (q * (h_ratio + a * g_ratio)), q * (q * g_ratio), q * (q * h_ratio), density, a


def relu_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of max(X, 0) for X ~ N(mean, variance); exact.

    With a = |mean| / std: for mean < 0, E = std g and V = variance (h - g^2), where g = phi G,
    h = phi H; for mean >= 0, max(X, 0) = X + max(-X, 0) gives E = mean + std g and
    V = variance (1 - h - 2 a g - g^2).
    """
    std = safe_sqrt(variance)
    positive = mean.clamp_min(0)
    a = _distance(mean, positive, std)
    g_ratio, h_ratio = _tail_ratios(a)
    q = _root_density(a)
    g = q * (q * g_ratio)
    w = variance * q
    below = w * (q * h_ratio)
    above = variance - w * (q * (h_ratio + 2 * a * g_ratio))
    out_variance = torch.where(mean >= 0, above, below) - (variance * g) * g
    return positive + std * g, out_variance


def _distance(mean: Tensor, positive: Tensor, std: Tensor) -> Tensor:
    """|mean| / std, bounded; positive = max(mean, 0)."""
    # |mean| / 2, but with the gradient of mean >= 0 at 0 (that of abs is 0), where all else takes that side
    half = torch.sub(positive, mean, alpha=0.5)
    return (half * (2 / std)).clamp_max(_FAR)


def positive_probability(mean: Tensor, variance: Tensor) -> Tensor:
    """P(X > 0) for X ~ N(mean, variance): Phi(mean / std), which is also the gain of ReLU."""
    a = _distance(mean, mean.clamp_min(0), safe_sqrt(variance))
    g_ratio, h_ratio = _tail_ratios(a)
    q = _root_density(a)
    tail = q * (q * (h_ratio + a * g_ratio))
    return torch.where(mean >= 0, 1 - tail, tail)


def max_moments(
    mean_1: Tensor,
    variance_1: Tensor,
    mean_2: Tensor,
    variance_2: Tensor,
    covariance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and variance of max(X1, X2) for normal X1 and X2; exact (Clark 1961).

    Clark's formulas in the terms of `relu_moments`, with theta^2 = V1 + V2 - 2 C, a = |E1 - E2| / theta and
    hi, lo the variable with the higher and the lower mean:

        E = max(E1, E2) + theta g,
        V = V_hi (1 - h - 2 a g - g^2) + V_lo (h - g^2) + 2 C (a + g) g.

    Both brackets are non-negative, so V is where C = 0 (the default).
    """
    return max_response(mean_1, variance_1, mean_2, variance_2, covariance)[:2]


def max_response(
    mean_1: Tensor,
    variance_1: Tensor,
    mean_2: Tensor,
    variance_2: Tensor,
    covariance: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`max_moments`, and P(X1 > X2): the gain of max(X1, X2) on X1; that on X2 is 1 less it."""
    total = variance_1 + variance_2
    if covariance is not None:
        total = (total - 2 * covariance).clamp_min(0)
    theta = safe_sqrt(total)
    first_is_higher = mean_1 >= mean_2
    higher_mean = torch.where(first_is_higher, mean_1, mean_2)
    lower_mean = torch.where(first_is_higher, mean_2, mean_1)
    a = ((higher_mean - lower_mean) * (1 / theta)).clamp_max(_FAR)
    g_ratio, h_ratio = _tail_ratios(a)
    q = _root_density(a)
    g = q * (q * g_ratio)
    higher = torch.where(first_is_higher, variance_1, variance_2)
    lower = torch.where(first_is_higher, variance_2, variance_1)
    change = q * (q * (lower * h_ratio - higher * (h_ratio + 2 * a * g_ratio)))
    if covariance is None:
        variance = higher + change - (total * g) * g
    else:
        shared = 2 * (covariance * g) * a  # 2 C g^2 is in total already
        variance = (higher + change + shared - (total * g) * g).clamp_min(0)
    tail = q * (q * (h_ratio + a * g_ratio))
    return higher_mean + theta * g, variance, torch.where(first_is_higher, 1 - tail, tail)


def log_normal_cdf(x: Tensor) -> Tensor:
    """log P(Z <= x) for a standard normal Z, to full relative precision in both tails.

    For x < 0: log phi(x) + log M(|x|); for x >= 0: log(1 - phi(x) M(x)).
    """
    # where, not abs: its gradient at 0 is not 0. The bound keeps a^2 from overflowing in float32.
    a = torch.where(x < 0, -x, x).clamp_max(1e18)
    g_ratio, h_ratio = _tail_ratios(a)
    mills = h_ratio + a * g_ratio
    lower = mills.log() - a * a * 0.5 - 0.5 * math.log(2 * math.pi)
    upper = torch.log1p(-(torch.exp(a * a * -0.5) * mills * (1 / math.sqrt(2 * math.pi))))
    return torch.where(x < 0, lower, upper)
