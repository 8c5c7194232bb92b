"""Dense layers and matrix products with a constant: mean `W E + b`, variance `(W*W) V`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.local import Linear
from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.registry import EXACT_IF_UNCORRELATED, rule
from momentprop.rules.families import broadcast, gathered, linear_map, one_random, squared

aten = torch.ops.aten


def _dense(out: Moments, x: Moments, weight: Tensor, bias: Tensor | None = None) -> Linear:
    return Linear(lambda cotangent: [torch.matmul(cotangent, weight)])


linear_map(aten.linear.default, local=_dense)


def _back_to_first(cotangent: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """From a cotangent [K, *(a @ b).shape] to one of a."""
    if b.dim() == 1:
        back = cotangent[..., None] * b  # a @ b lost its last dimension
    elif a.dim() == 1:
        back = torch.matmul(cotangent[..., None, :], b.mT)[..., 0, :]
    else:
        back = torch.matmul(cotangent, b.mT)
    return gathered(back, a.shape)


def _back_to_second(cotangent: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """From a cotangent [K, *(a @ b).shape] to one of b."""
    if a.dim() == 1:  # a @ b lost the last dimension but one
        back = cotangent[..., None] * a if b.dim() == 1 else a[:, None] * cotangent[..., None, :]
    elif b.dim() == 1:
        back = torch.matmul(cotangent[..., None, :], a)[..., 0, :]
    else:
        back = torch.matmul(a.mT, cotangent)
    return gathered(back, b.shape)


def _product(op: Any) -> None:
    """a @ b with one of them constant: variance is the product of V and the constant squared."""

    def local(out: Moments, a: Any, b: Any) -> Linear:
        back = _back_to_first if is_moments(a) else _back_to_second
        return Linear(lambda cotangent: [back(cotangent, mean_of(a), mean_of(b))])

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear", refuses=one_random, local=local)
    def propagate(a: Any, b: Any) -> Moments:
        mean = op(mean_of(a), mean_of(b))
        return Moments(mean, op(*[f.variance if is_moments(f) else squared(f, mean.dtype) for f in (a, b)]))


for _op in (aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default):
    _product(_op)


def _refuses(_: Any, random: frozenset[str]) -> str | None:
    factors = random - {"self"}
    return "the product of two random tensors has no rule" if len(factors) > 1 else None


def _affine_product(op: Any, mm: Any) -> None:
    """beta x + alpha (A @ B), with at most one of A and B random."""

    def local(out: Moments, x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Linear:
        def pull(cotangent: Tensor) -> list[Tensor]:
            pulled = [gathered(cotangent, x.shape) * beta] if is_moments(x) else []
            if is_moments(a):
                pulled.append(_back_to_first(cotangent, a.mean, b) * alpha)
            elif is_moments(b):
                pulled.append(_back_to_second(cotangent, a, b.mean) * alpha)
            return pulled

        return Linear(pull)

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear", refuses=_refuses, local=local)
    def propagate(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Moments:
        mean = op(mean_of(x), mean_of(a), mean_of(b), beta=beta, alpha=alpha)
        variance = beta * beta * variance_of(x)
        if is_moments(a) or is_moments(b):
            squares = [f.variance if is_moments(f) else f * f for f in (a, b)]
            variance = variance + alpha * alpha * mm(*squares)
        return Moments(mean, broadcast(variance, mean))


_affine_product(aten.addmm.default, aten.mm.default)
_affine_product(aten.baddbmm.default, aten.bmm.default)
