"""add, sub, div, neg: sums, and quotients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.rules.families import affine, broadcast, squared
from momentprop.rules.linearization import Linearization, Propagated, gathered, mapped
from momentprop.rules.registry import EXACT, EXACT_IF_UNCORRELATED, rule

aten = torch.ops.aten


def _sum(op: Any, weigh_second: bool = True, signs: tuple[int, int] = (1, 1)) -> None:
    """x + alpha y (add, sub) or y - alpha x (rsub): variances add, weighted by alpha^2."""

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear")
    def propagate(x: Any, y: Any, alpha: float = 1) -> Propagated:
        # torch keeps alpha positional for .Scalar overloads and keyword-only for .Tensor ones
        mean = op(mean_of(x), mean_of(y), alpha=alpha)
        first, second = variance_of(x), variance_of(y)
        weight = alpha * alpha
        variance = first + weight * second if weigh_second else weight * first + second
        out = Moments(mean, broadcast(variance, mean))
        gains = (signs[0], alpha * signs[1]) if weigh_second else (alpha * signs[0], signs[1])
        if is_moments(x) and is_moments(y):
            shapes = [(x.shape, gains[0]), (y.shape, gains[1])]
            return Propagated(out, lambda: mapped(lambda c: [_weighted(c, w, shape) for shape, w in shapes]))
        gain = gains[0] if is_moments(x) else gains[1]
        return affine(out, x if is_moments(x) else y, None if gain == 1 else gain)


def _weighted(cotangent: Tensor, weight: float, shape: torch.Size) -> Tensor:
    return gathered(cotangent if weight == 1 else cotangent * weight, shape)


for _op in (aten.add.Tensor, aten.add.Scalar):
    _sum(_op)
for _op in (aten.sub.Tensor, aten.sub.Scalar):
    _sum(_op, signs=(1, -1))
for _op in (aten.rsub.Tensor, aten.rsub.Scalar):
    _sum(_op, weigh_second=False, signs=(-1, 1))


def _reciprocal(y: Any) -> Moments:
    """1 / Y for Y of one sign, as if it were log-normal: with c = V / E^2, E[1/Y] = (1 + c) / E, and
    Var[1/Y] = c E[1/Y]^2. Bounded, at c = 1, where the sign of Y is in doubt."""
    square = (y.mean * y.mean).clamp_min(torch.finfo(y.dtype).tiny ** 0.5)
    c = (y.variance / square).clamp_max(1.0)
    mean = (1 + c) * y.mean / square
    return Moments(mean, c * mean * mean)


def _by_random(x: Any, divisor: Moments) -> Propagated:
    """X / Y as the product of X and 1/Y, independent of each other."""
    inverse = _reciprocal(divisor)
    center = mean_of(x)
    mean = center * inverse.mean
    variance = center * center * inverse.variance
    if is_moments(x):
        variance = variance + x.variance * (inverse.variance + inverse.mean * inverse.mean)

    def linearize() -> Linearization:
        # the covariance of Y and 1/Y is -c, so the gain is -c / V = -1 / E^2
        slope = -1 / (divisor.mean * divisor.mean).clamp_min(torch.finfo(mean.dtype).tiny ** 0.5)
        own = (inverse.variance - slope * slope * divisor.variance).clamp_min(0)
        noise = center * center * own
        if is_moments(x):
            noise = noise + x.variance * inverse.variance
        weights = [(inverse.mean, x.shape)] if is_moments(x) else []
        weights.append((center * slope, divisor.shape))
        return mapped(lambda c: [gathered(c * w, shape) for w, shape in weights], noise.expand_as(mean))

    return Propagated(Moments(mean, variance), linearize)


def _quotient(op: Any) -> None:
    exactness = "exact by a constant; by a random tensor approximate: log-normal, independent"

    @rule(op, exactness=exactness, reference="product")
    def propagate(x: Any, divisor: Any) -> Propagated:
        if is_moments(divisor):
            return _by_random(x, divisor)
        mean = op(x.mean, divisor)
        return affine(Moments(mean, op(x.variance, squared(divisor, mean.dtype))), x, 1 / divisor)


_quotient(aten.div.Tensor)
_quotient(aten.div.Scalar)


@rule(aten.neg.default, exactness=EXACT, reference="linear")
def neg(x: Moments) -> Propagated:
    return affine(Moments(-x.mean, x.variance), x, -1.0)
