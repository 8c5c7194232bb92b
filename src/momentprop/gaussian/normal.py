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

ReLU and the maximum are most of what a converted network computes besides its linear layers. For them, in
float32, G and H are quotients P_G(a) / Q(a) and P_H(a) / Q(a) of polynomials of degree 4, 3 and 6: one
division for both. All coefficients are positive, so nothing cancels; fitted (minimax) to 0 <= a <= 15, where
the relative error is below 1e-7 for G and 9e-7 for H. Beyond, phi is below 1e-49.

What leads to the square root in those two is written with relu, not with comparisons or clamps. For AVX-512
these make a vector of a mask, and that waits for whatever its register held before: the end of the loop's
last round. No round then begins before the last is over, and the moments take twice the time.
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

_NUMERATOR_G = (  # times phi(0), as is that of H
    0.0027127071428678347,
    0.02527871764358997,
    0.1187227623779572,
    0.3109064093536608,
    0.3989422929862604,
)
_NUMERATOR_H = (0.005422547913599383, 0.0506943109661591, 0.21844819548283503, 0.4999996010937479)
_DENOMINATOR = (
    0.006799759462567783,
    0.06336411017551656,
    0.3179875265826804,
    0.9697580644737502,
    1.845168804143116,
    2.032638335975539,
    1.0,
)

# Beyond 60 standard deviations every tail is exactly 0 in float64 too; a^2 stays far from overflow.
_FAR = 60.0
_FAR_FLOAT32 = 25.0
_ROOT_PHI_0 = (2 * math.pi) ** -0.25  # sqrt(phi(0))


def _tail_ratios(a: Tensor) -> tuple[Tensor, Tensor]:
    """(G, H) for a >= 0."""
    scale, coefficients = _FLOAT64 if a.dtype == torch.float64 else _FLOAT32
    t = 1 / (1 + a * (1 / scale))
    h = t * t * t * _polynomial(coefficients, t)
    return (1 - a * h) / (1 + a * a), h


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    value = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * x + coefficient
    return value


def _distance(x: Tensor, positive: Tensor, std: Tensor) -> Tensor:
    """|x| / std, bounded, with positive = relu(x); its gradient at 0 is that of x < 0, unlike that of abs."""
    far = positive + (positive - x)
    # not far / std: where that is infinite its gradient is no number
    return (far * std.reciprocal()).clamp_max(_FAR if std.dtype == torch.float64 else _FAR_FLOAT32)


def _tail_factors(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three factors: phi G is the first times the second, phi H the first times the third; for `_distance`s.

    The first and either of the others hold the root of the density each. So a product of the first with
    something large comes before that with the other, and reaches twice as far before it underflows.
    """
    if a.dtype == torch.float64:
        q = _root_density(a)
        g_ratio, h_ratio = _tail_ratios(a)
        return q, q * g_ratio, q * h_ratio
    q = torch.exp(a * a * -0.25)
    return (
        q / _polynomial(_DENOMINATOR, a),
        q * _polynomial(_NUMERATOR_G, a),
        q * _polynomial(_NUMERATOR_H, a),
    )


def _root_density(a: Tensor) -> Tensor:
    """sqrt(phi(a)). As a factor applied twice it reaches twice as far before it underflows."""
    return torch.exp(a * a * -0.25) * _ROOT_PHI_0


def safe_sqrt(variance: Tensor) -> Tensor:
    """sqrt, with a floor that keeps its gradient, and quotients by it, finite at zero variance.

    The floor is about 5e-31 in float32 and 5e-247 in float64, below any variance that matters.
    """
    floor = torch.finfo(variance.dtype).tiny ** 0.8
    return (torch.relu(variance - floor) + floor).sqrt()


def root(variance: Tensor) -> Tensor:
    """sqrt that is 0 at 0, with a gradient of 0 there: what does not vary adds nothing to a covariance."""
    return torch.where(variance > 0, safe_sqrt(variance), 0.0)


def tail_moments(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """P(Z > a), E[(Z - a)+], E[(Z - a)+^2] and phi(a) for a >= 0, and a itself, bounded."""
    a = a.clamp_max(_FAR)
    g_ratio, h_ratio = _tail_ratios(a)
    q = _root_density(a)
    density = q * q
    return q * (q * (h_ratio + a * g_ratio)), q * (q * g_ratio), q * (q * h_ratio), density, a


def relu_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of max(X, 0) for X ~ N(mean, variance); exact.

    With a = |mean| / std, and g = phi G, h = phi H: for mean <= 0, E = std g and V = variance (h - g^2); for
    mean > 0, max(X, 0) = X + max(-X, 0) gives E = mean + std g and V = variance (h - g^2 + 1 - 2 P(X < 0)),
    where P(X < 0) = h + a g.
    """
    std, positive = safe_sqrt(variance), torch.relu(mean)
    a = _distance(mean, positive, std)
    left, first, second = _tail_factors(a)
    scaled = variance * left
    g = left * first
    below = scaled * (second - first * g)
    above = torch.sub(variance, scaled * (second + a * first), alpha=2)
    return positive + std * g, below + torch.where(mean > 0, above, 0.0)


def positive_probability(mean: Tensor, variance: Tensor) -> Tensor:
    """P(X > 0) for X ~ N(mean, variance): Phi(mean / std), which is also the gain of ReLU."""
    a = _distance(mean, torch.relu(mean), safe_sqrt(variance))
    left, first, second = _tail_factors(a)
    tail = left * (second + a * first)
    return torch.where(mean > 0, 1 - tail, tail)


def max_moments(
    mean_1: Tensor,
    variance_1: Tensor,
    mean_2: Tensor,
    variance_2: Tensor,
    covariance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and variance of max(X1, X2) for normal X1 and X2; exact (Clark 1961).

    Clark's formulas in the terms of `relu_moments`: with hi, lo the variable with the higher and the lower
    mean, the maximum is hi + max(lo - hi, 0). With theta^2 = V1 + V2 - 2 C, a = |E1 - E2| / theta and the
    probability P = h + a g that lo is larger,

        E = max(E1, E2) + theta g,
        V = V_hi + theta^2 (h - g^2) - 2 P (V_hi - C).

    P <= 1/2, so V is not negative where C = 0 (the default).
    """
    return max_response(mean_1, variance_1, mean_2, variance_2, covariance)[:2]


def contrasted_max_moments(
    mean_1: Tensor, variance_1: Tensor, mean_2: Tensor, variance_2: Tensor, contrast: Tensor
) -> tuple[Tensor, Tensor]:
    """`max_moments` of variables with Var(X1 - X2) = contrast (V1 + V2) / 2, but for rounding."""
    total = variance_1 + variance_2
    spread = total * (contrast * 0.5)
    return _max_response(mean_1, variance_1, mean_2, variance_2, spread, total - spread)[:2]


def alike_max_moments(
    mean_1: Tensor, mean_2: Tensor, variance: Tensor, contrast: Tensor
) -> tuple[Tensor, Tensor]:
    """`contrasted_max_moments` of variables with the same variance V.

    In the terms of `max_moments` theta^2 = contrast V = 2 (V - C), so that two terms of three become one:

        E = max(E1, E2) + theta g,  V - theta^2 g (g + a).

    As g (g + a) <= 1 / (2 pi) and theta^2 <= 4 V, this is never below a third of V.
    """
    spread = variance * contrast
    theta, difference = safe_sqrt(spread), mean_1 - mean_2
    a = _distance(difference, torch.relu(difference), theta)
    left, first, _ = _tail_factors(a)
    g = left * first
    return torch.where(difference > 0, mean_1, mean_2) + theta * g, variance - spread * (g * (g + a))


def max_response(
    mean_1: Tensor,
    variance_1: Tensor,
    mean_2: Tensor,
    variance_2: Tensor,
    covariance: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`max_moments`, and P(X1 > X2): the gain of max(X1, X2) on X1; that on X2 is 1 less it."""
    spread = variance_1 + variance_2
    if covariance is None:
        return _max_response(mean_1, variance_1, mean_2, variance_2, spread, None)
    shared = 2 * covariance
    spread = torch.relu(spread - shared)
    mean, variance, wins = _max_response(mean_1, variance_1, mean_2, variance_2, spread, shared)
    return mean, variance.clamp_min(0), wins


def _max_response(
    mean_1: Tensor,
    variance_1: Tensor,
    mean_2: Tensor,
    variance_2: Tensor,
    spread: Tensor,
    shared: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take theta^2, the variance of X1 - X2, and twice the covariance (None stands for zero)."""
    theta, difference = safe_sqrt(spread), mean_1 - mean_2
    a = _distance(difference, torch.relu(difference), theta)
    left, first, second = _tail_factors(a)
    g = left * first
    tail = left * (second + a * first)
    # two comparisons: of one that means and variances share compilers write the bits out, byte by byte
    higher = torch.where(difference > 0, variance_1, variance_2)
    own = 2 * higher if shared is None else 2 * higher - shared
    variance = higher - tail * own + (spread * left) * (second - first * g)
    mean = torch.where(mean_1 > mean_2, mean_1, mean_2) + theta * g
    return mean, variance, torch.where(difference > 0, 1 - tail, tail)


def log_normal_cdf(x: Tensor) -> Tensor:
    """log P(Z <= x) for a standard normal Z, to full relative precision in both tails.

    For x < 0: log phi(x) + log M(|x|); for x >= 0: log(1 - phi(x) M(x)).
    """
    # where, not abs: its gradient at 0 is not 0. The bound keeps a^2 from overflowing.
    a = torch.where(x < 0, -x, x).clamp_max(torch.finfo(x.dtype).max ** 0.5 / 8)
    g_ratio, h_ratio = _tail_ratios(a)
    mills = h_ratio + a * g_ratio
    lower = mills.log() - a * a * 0.5 - 0.5 * math.log(2 * math.pi)
    upper = torch.log1p(-(torch.exp(a * a * -0.5) * mills * (1 / math.sqrt(2 * math.pi))))
    return torch.where(x < 0, lower, upper)
