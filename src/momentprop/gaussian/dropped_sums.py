"""Softmax and norms of values of which each is kept or dropped, by itself.

They are functions of a value and of sums over all values,

    y_k = a(d_k) f(S) + g(S):    softmax       a = exp(d),  S = sum exp(d),         f = 1 / S
                                 log-softmax   a = d,       S = sum exp(d),         f = 1, g = -log S
                                 RMS norm      a = d,       S = sum d^2,            f = (S / n + eps)^-1/2
                                 layer norm    a = d,       S = (sum d, sum d^2),   f = r, g = -r mean(d),

with r the inverse root of variance plus eps. A value d has few outcomes: 0, or x / (1 - p), or where x is
random the three points of Gauss and Hermite in its place. Given the outcome of d_k itself, S is that of all
others plus its own part. A positive sum over the others counts as log-normal, with three points, of layer
norm the sum of squares about the mean of the others, beside which their sum counts as normal. In softmax
and RMS norm the value that matters most goes by its outcomes, and only the rest as log-normal. So

    mean = E[m_c],    variance = E[v_c] + V[m_c]

over the outcomes c, with m_c and v_c those of y given c. With J the difference that an outcome makes, kept
less dropped, y_k responds to its own mask by J m_c, and to that of d_j by

    A_k J E[f | d_j] + J E[g | d_j],    A_k = E[a(d_k) f^2] / E[f^2],

where f^2 weighs a as a change of S = sum exp(d) does. These are two sums over k, so the cost is that of n
values. To a random x_j it responds by Stein's lemma in the same form, E[y (x_j - E x_j)] / V[x_j].

Measured in tests/gaussian/test_dropped_sums.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.normal import safe_sqrt

_NODES = ((-math.sqrt(3), 1 / 6), (0.0, 2 / 3), (math.sqrt(3), 1 / 6))
_STEP = 0.02  # least standard deviation at which responses to x are taken
_DEPTH = 30.0  # logits that are further below the largest count as so far below: squares do not underflow

Points = list[tuple[Any, Tensor, Tensor]]  # weight, f and g, given the outcome of one value
Function = Callable[[Any, Tensor], tuple[Tensor, Points]]  # (chances, values [C, ..., n]) -> a, points


@dataclass(frozen=True, eq=False)
class Response:
    """How all y respond to one quantity of each element: level_k first_j + second_j, and own_j to its own."""

    level: Tensor
    first: Tensor
    second: Tensor
    own: Tensor

    def along(self, cotangent: Tensor) -> Tensor:
        """Products of cotangents [K, ..., n] with the responses to every element."""
        total = (cotangent * self.level).sum(-1, keepdim=True) * self.first
        alone = self.own - self.level * self.first - self.second
        return total + cotangent.sum(-1, keepdim=True) * self.second + cotangent * alone

    def variance(self, variance: Any) -> Tensor:
        """Variance of every y, where the quantities are independent and have this variance."""
        weighted = variance * self.first
        square, cross = weighted * self.first, weighted * self.second
        alone = variance * self.second * self.second
        sums = [part.sum(-1, keepdim=True) - part for part in (square, cross, alone)]
        others = (sums[0] * self.level + 2 * sums[1]) * self.level + sums[2]
        return others.clamp_min(0) + variance * self.own * self.own


@dataclass(frozen=True, eq=False)
class DroppedSums:
    """Moments of y, and how it responds to the masks and to random values."""

    mean: Tensor
    variance: Tensor
    linear: Callable[[], tuple[Response, Response | None]]


def dropped_sums(function: Function, mean: Tensor, variance: Tensor | None, p: float) -> DroppedSums:
    """Moments over the last dimension of a function of values before they are dropped."""
    q = 1 - p
    chances, values, std = _outcomes(mean, variance, p)
    own, points = function(chances, values)
    results = [own * f + g for _, f, g in points]
    given = _averaged(results, points)
    within = _averaged([(y - given).square() for y in results], points)
    center = _mixed(chances, given)
    out = center, _mixed(chances, within + (given - center).square())

    def linear() -> tuple[Response, Response | None]:
        f = _averaged([f for _, f, _ in points], points)
        g = _averaged([g for _, _, g in points], points)
        steep = _averaged([f * f for _, f, _ in points], points)
        level = _mixed(chances, own * steep) / _mixed(chances, steep)
        masks = [_mixed(chances[1:], v[1:]) / q - v[0] for v in (f, g, given)]
        if std is None:
            return Response(level, *masks), None
        gains = [(v[3] - v[1]) * (q * math.sqrt(3) / 6 / std) for v in (f, g, given)]
        return Response(level, *masks), Response(level, *gains)

    return DroppedSums(*out, linear)


def softmax(log: bool) -> Function:
    """Softmax or log-softmax."""

    def function(chances: Any, values: Tensor) -> tuple[Tensor, Points]:
        below = values - values.amax((0, -1), keepdim=True)
        weights = below.clamp_min(-_DEPTH).exp()
        low = weights.amin(0)
        least = _others(low)
        points: Points = []
        for share, total in _totals(chances, weights - low):
            total = least + total + weights
            f = torch.ones_like(total) if log else 1 / total
            points.append((share, f, -total.log() if log else torch.zeros_like(total)))
        return below if log else weights, points

    return function


def rms_norm(eps: Tensor) -> Function:
    def function(chances: Any, values: Tensor) -> tuple[Tensor, Points]:
        squares, n = values * values, values.shape[-1]
        zero = torch.zeros_like(values)
        return values, [
            (w, ((total + squares) / n + eps).rsqrt(), zero) for w, total in _totals(chances, squares)
        ]

    return function


def layer_norm(eps: Tensor) -> Function:
    def function(chances: Any, values: Tensor) -> tuple[Tensor, Points]:
        n = values.shape[-1]
        values = values - _mixed(chances, values).mean(-1, keepdim=True)
        points: Points = []
        for weight, total, squares in _about_the_mean(chances, values):
            apart = (n - 1) / n * (total / (n - 1) - values).square()
            scale = ((squares + apart) / n + eps).rsqrt()
            points.append((weight, scale, -scale * ((total + values) / n)))
        return values, points

    return function


def _about_the_mean(chances: Any, values: Tensor) -> list[tuple[float, Tensor, Tensor]]:
    """Points of the sum over all others, and of their sum of squares about their own mean."""
    n, parts = values.shape[-1] - 1, values * values
    mean, center = _mixed(chances, values), _mixed(chances, parts)
    common = _mixed(chances, (values - mean) * (parts - center))
    total, common = (part.sum(-1, keepdim=True) - part for part in (mean, common))
    square, dispersion = _sums_of_others(chances, parts)
    spread = _others(_mixed(chances, (values - mean).square()))
    slope = -2 * total / n  # of the square of the sum, which is taken off
    dispersion = (dispersion + slope * (2 * common + slope * spread)).clamp_min(0)
    rounding = torch.finfo(values.dtype).eps * square
    square = torch.maximum(square - (total * total + spread) / n, rounding)
    std = safe_sqrt(spread)
    correlation = ((common + slope * spread) / (std * safe_sqrt(dispersion))).clamp(-1, 1)
    points = []
    for z, weight in _NODES:
        for share, rest in _log_normal(square, dispersion, correlation, z):
            points.append((weight * share, total + z * std, rest))
    return points


def _outcomes(mean: Tensor, variance: Tensor | None, p: float) -> tuple[Any, Tensor, Any]:
    """Chances and values of a dropped value: 0 first; and how far the points of a random one are apart.

    The points of a small variance stay apart and have smaller weights, so that differences of them count.
    """
    q, zero = 1 - p, torch.zeros_like(mean)
    if variance is None:
        return (p, q), torch.stack([zero, mean / q]), None
    std = safe_sqrt(variance).clamp_min(_STEP)
    side = (q / 6) * (variance / (std * std))
    values = [zero, *[(mean + z * std) / q for z, _ in _NODES]]
    return (p, side, q - 2 * side, side), torch.stack(values), std


def _mixed(chances: Any, values: Tensor) -> Any:
    """The average over outcomes, which come first."""
    return sum(chance * value for chance, value in zip(chances, values, strict=True))


def _averaged(values: Sequence[Tensor], points: Points) -> Any:
    """The average over points."""
    return sum(weight * value for value, (weight, _, _) in zip(values, points, strict=True))


def _others(part: Tensor) -> Tensor:
    """Sums over all others of what is positive: no difference for the largest, where it would cancel."""
    index = torch.arange(part.shape[-1], device=part.device)
    largest = index == part.argmax(-1, keepdim=True)
    rest = part.masked_fill(largest, 0.0).sum(-1, keepdim=True)
    return torch.where(largest, rest, part.sum(-1, keepdim=True) - part)


def _totals(chances: Any, parts: Tensor) -> list[tuple[Any, Tensor]]:
    """Points of the sum over all others, of which the one that matters most goes by its outcomes."""
    index = torch.arange(parts.shape[-1], device=parts.device)
    largest = index == (parts.amax(0) - parts.amin(0)).argmax(-1, keepdim=True)
    rest = _log_normal(*_sums_of_others(chances, parts.masked_fill(largest, 0.0)))
    points = []
    for chance, part in zip(chances, parts, strict=True):
        if isinstance(chance, Tensor):
            chance = (chance * largest).sum(-1, keepdim=True)
        one = torch.where(largest, 0.0, (part * largest).sum(-1, keepdim=True))
        points += [(chance * weight, one + total) for weight, total in rest]
    return points


def _sums_of_others(chances: Any, parts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the sum over all others of a statistic."""
    mean = _mixed(chances, parts)
    return _others(mean), _others(_mixed(chances, (parts - mean).square()))


def _log_normal(
    mean: Tensor, variance: Tensor, correlation: Tensor | None = None, z: float = 0.0
) -> list[tuple[float, Tensor]]:
    """Weights and values of a log-normal variable, given how far one is off that its logarithm goes with."""
    mean = mean.clamp_min(torch.finfo(mean.dtype).tiny ** 0.5)
    wide = torch.log1p((safe_sqrt(variance) / mean).square())
    middle, std = mean.log() - wide / 2, safe_sqrt(wide)
    if correlation is not None:
        middle = middle + std * (correlation * z)
        std = std * safe_sqrt(1 - correlation * correlation)
    return [(weight, (middle + std * y).exp()) for y, weight in _NODES]
