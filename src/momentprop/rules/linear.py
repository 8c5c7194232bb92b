"""Dense layers and matrix products with a constant: mean `W E + b`, variance `(W*W) V`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.local import Linear
from momentprop.moments import Moments, mean_of, variance_of
from momentprop.registry import EXACT_IF_UNCORRELATED, rule
from momentprop.rules.families import broadcast, linear_map, product

aten = torch.ops.aten


def _dense(out: Moments, x: Moments, weight: Tensor, bias: Tensor | None = None) -> Linear:
    return Linear(lambda cotangent: [torch.matmul(cotangent, weight)])


linear_map(aten.linear.default, local=_dense)
product(aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)


def _refuses(_: Any, random: frozenset[str]) -> str | None:
    factors = random - {"self"}
    return "the product of two random tensors has no rule" if len(factors) > 1 else None


def _affine_product(op: Any, mm: Any) -> None:
    """beta x + alpha (A @ B), with at most one of A and B random."""

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear", refuses=_refuses, acts="linear")
    def propagate(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Moments:
        mean = op(mean_of(x), mean_of(a), mean_of(b), beta=beta, alpha=alpha)
        variance = beta * beta * variance_of(x)
        if isinstance(a, Moments) or isinstance(b, Moments):
            squared = [f.variance if isinstance(f, Moments) else f * f for f in (a, b)]
            variance = variance + alpha * alpha * mm(*squared)
        return Moments(mean, broadcast(variance, mean))


_affine_product(aten.addmm.default, aten.mm.default)
_affine_product(aten.baddbmm.default, aten.bmm.default)
