"""add, sub, mul, div, neg: sums of random tensors, products with constants."""

from __future__ import annotations

from typing import Any

import torch

from momentprop.moments import Moments, mean_of, variance_of
from momentprop.registry import EXACT, EXACT_IF_UNCORRELATED, rule
from momentprop.rules.families import broadcast, only_random, product, squared

aten = torch.ops.aten

product(aten.mul.Tensor, aten.mul.Scalar)


def _sum(op: Any, weigh_second: bool = True) -> None:
    """x + alpha y (add, sub) or y - alpha x (rsub): variances add, weighted by alpha^2."""

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear")
    def propagate(x: Any, y: Any, alpha: float = 1) -> Moments:
        # torch keeps alpha positional for .Scalar overloads and keyword-only for .Tensor ones
        mean = op(mean_of(x), mean_of(y), alpha=alpha)
        first, second = variance_of(x), variance_of(y)
        weight = alpha * alpha
        variance = first + weight * second if weigh_second else weight * first + second
        return Moments(mean, broadcast(variance, mean))


for _op in (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar):
    _sum(_op)
for _op in (aten.rsub.Tensor, aten.rsub.Scalar):
    _sum(_op, weigh_second=False)


def _quotient(op: Any) -> None:
    @rule(op, exactness=EXACT, reference="linear", refuses=only_random("self"))
    def propagate(x: Moments, divisor: Any) -> Moments:
        mean = op(x.mean, divisor)
        return Moments(mean, op(x.variance, squared(divisor, mean.dtype)))


_quotient(aten.div.Tensor)
_quotient(aten.div.Scalar)


@rule(aten.neg.default, exactness=EXACT, reference="linear")
def neg(x: Moments) -> Moments:
    return Moments(-x.mean, x.variance)
