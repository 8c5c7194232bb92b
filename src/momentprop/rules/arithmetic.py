"""add, sub, div, neg: sums, and quotients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.rules.families import affine, broadcast, gathered, lifted, scaling, squared
from momentprop.rules.local import Elementwise, Linear, Local
from momentprop.rules.registry import EXACT, EXACT_IF_UNCORRELATED, rule

aten = torch.ops.aten


def _sum(op: Any, weigh_second: bool = True, signs: tuple[int, int] = (1, 1)) -> None:
    """x + alpha y (add, sub) or y - alpha x (rsub): variances add, weighted by alpha^2."""

    def local(out: Moments, x: Any, y: Any, alpha: float = 1) -> Local:
        first, second = (signs[0], alpha * signs[1]) if weigh_second else (alpha * signs[0], signs[1])
        weighted = [(v, weight) for v, weight in ((x, first), (y, second)) if is_moments(v)]
        if len(weighted) == 1 and weighted[0][0].shape == out.shape:
            return Elementwise(None if weighted[0][1] == 1 else weighted[0][1])

        shapes = [(v.shape, w) for v, w in weighted]

        def pull(cotangent: Tensor) -> list[Tensor]:
            return [gathered(cotangent if w == 1 else cotangent * w, shape) for shape, w in shapes]

        return Linear(pull)

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear", local=local)
    def propagate(x: Any, y: Any, alpha: float = 1) -> Moments:
        # torch keeps alpha positional for .Scalar overloads and keyword-only for .Tensor ones
        mean = op(mean_of(x), mean_of(y), alpha=alpha)
        first, second = variance_of(x), variance_of(y)
        weight = alpha * alpha
        variance = first + weight * second if weigh_second else weight * first + second
        out = Moments(mean, broadcast(variance, mean))
        if is_moments(x) != is_moments(y):
            return affine(out, x if is_moments(x) else y, 1.0 if is_moments(x) == weigh_second else alpha)
        return out


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


def _quotient(op: Any) -> None:
    def local(out: Moments, x: Any, divisor: Any) -> Local:
        if not is_moments(divisor):
            return scaling(out, x, 1 / divisor)
        inverse = _reciprocal(divisor)
        # the covariance of Y and 1/Y is -c, so the gain is -c / V = -1 / E^2
        slope = -1 / (divisor.mean * divisor.mean).clamp_min(torch.finfo(out.dtype).tiny ** 0.5)
        own = (inverse.variance - slope * slope * divisor.variance).clamp_min(0)

        def pull(cotangent: Tensor) -> list[Tensor]:
            first = [gathered(cotangent * inverse.mean, x.shape)] if is_moments(x) else []
            return [*first, gathered(cotangent * mean_of(x) * slope, divisor.shape)]

        def push(*deviations: Tensor) -> Tensor:
            n = out.mean.dim()
            total = mean_of(x) * slope * lifted(deviations[-1], n)
            return total + lifted(deviations[0], n) * inverse.mean if is_moments(x) else total

        second = mean_of(x) * mean_of(x)
        noise = second * own
        if is_moments(x):
            noise = noise + x.variance * inverse.variance
        return Linear(pull, noise.expand_as(out.mean), push=push)

    exactness = "exact by a constant; by a random tensor approximate: log-normal, independent"

    @rule(op, exactness=exactness, reference="product", local=local)
    def propagate(x: Any, divisor: Any) -> Moments:
        if is_moments(divisor):
            inverse = _reciprocal(divisor)
            mean = mean_of(x) * inverse.mean
            variance = mean_of(x) * mean_of(x) * inverse.variance
            if is_moments(x):
                variance = variance + x.variance * (inverse.variance + inverse.mean * inverse.mean)
            return Moments(mean, variance)
        mean = op(x.mean, divisor)
        return affine(Moments(mean, op(x.variance, squared(divisor, mean.dtype))), x, 1 / divisor)


_quotient(aten.div.Tensor)
_quotient(aten.div.Scalar)


@rule(aten.neg.default, exactness=EXACT, reference="linear", local=lambda out, x: Elementwise(-1.0))
def neg(x: Moments) -> Moments:
    return affine(Moments(-x.mean, x.variance), x, -1.0)
