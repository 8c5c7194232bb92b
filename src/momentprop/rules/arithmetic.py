"""add, sub, mul, div, neg: sums of random tensors, products with constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.local import Elementwise, Linear, Local
from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.registry import EXACT, EXACT_IF_UNCORRELATED, rule
from momentprop.rules.families import affine, broadcast, gathered, one_random, only_random, scaling, squared

aten = torch.ops.aten


def _product(op: Any) -> None:
    def local(out: Moments, x: Any, y: Any) -> Local:
        return scaling(out, x, y) if is_moments(x) else scaling(out, y, x)

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear", refuses=one_random, local=local)
    def propagate(x: Any, y: Any) -> Moments:
        mean = op(mean_of(x), mean_of(y))
        squares = [f.variance if is_moments(f) else squared(f, mean.dtype) for f in (x, y)]
        random, constant = (x, y) if is_moments(x) else (y, x)
        return affine(Moments(mean, op(*squares)), random, constant)


_product(aten.mul.Tensor)
_product(aten.mul.Scalar)


def _sum(op: Any, weigh_second: bool = True, signs: tuple[int, int] = (1, 1)) -> None:
    """x + alpha y (add, sub) or y - alpha x (rsub): variances add, weighted by alpha^2."""

    def local(out: Moments, x: Any, y: Any, alpha: float = 1) -> Local:
        first, second = (signs[0], alpha * signs[1]) if weigh_second else (alpha * signs[0], signs[1])
        weighted = [(v, weight) for v, weight in ((x, first), (y, second)) if is_moments(v)]
        if len(weighted) == 1 and weighted[0][0].shape == out.shape:
            return Elementwise(None if weighted[0][1] == 1 else weighted[0][1])

        def pull(cotangent: Tensor) -> list[Tensor]:
            return [gathered(cotangent if w == 1 else cotangent * w, v.shape) for v, w in weighted]

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


def _quotient(op: Any) -> None:
    def local(out: Moments, x: Moments, divisor: Any) -> Local:
        return scaling(out, x, 1 / divisor)

    @rule(op, exactness=EXACT, reference="linear", refuses=only_random("self"), local=local)
    def propagate(x: Moments, divisor: Any) -> Moments:
        mean = op(x.mean, divisor)
        return affine(Moments(mean, op(x.variance, squared(divisor, mean.dtype))), x, 1 / divisor)


_quotient(aten.div.Tensor)
_quotient(aten.div.Scalar)


@rule(aten.neg.default, exactness=EXACT, reference="linear", local=lambda out, x: Elementwise(-1.0))
def neg(x: Moments) -> Moments:
    return affine(Moments(-x.mean, x.variance), x, -1.0)
