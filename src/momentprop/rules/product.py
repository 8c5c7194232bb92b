"""Products: element by element, and of matrices; of a random tensor with a constant, or of two random ones.

For Z = X Y with covariance C = Cov(X, Y) of each pair of factors, known where both are the same tensor and
taken as 0 elsewhere,

    E[Z] = E_x E_y + C,
    Var[Z] = V_x E_y^2 + E_x^2 V_y + V_x V_y + 2 E_x E_y C + C^2,

exact for independent factors, and for jointly Gaussian ones. Matrix products add these up. Seen from any
other variable, Z is E_y X + E_x Y; the noise of its own is V_x V_y + C^2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.rules.families import affine, broadcast, gathered, lifted, scaling, squared
from momentprop.rules.local import Linear, Local
from momentprop.rules.registry import EXACT_IF_UNCORRELATED, rule

aten = torch.ops.aten


def _by_element(op: Any) -> None:
    def local(out: Moments, x: Any, y: Any) -> Local:
        if not (is_moments(x) and is_moments(y)):
            return scaling(out, x, y) if is_moments(x) else scaling(out, y, x)

        mean_x, mean_y, n = x.mean, y.mean, out.mean.dim()

        def pull(cotangent: Tensor) -> list[Tensor]:
            return [gathered(cotangent * mean_y, mean_x.shape), gathered(cotangent * mean_x, mean_y.shape)]

        def push(dx: Tensor, dy: Tensor) -> Tensor:
            return lifted(dx, n) * mean_y + mean_x * lifted(dy, n)

        shared = x.variance if x is y else None
        noise = x.variance * y.variance

        def bend(d: list[Tensor], e: list[Tensor]) -> Tensor:
            (dx, dy), (ex, ey) = ([lifted(v, n) for v in part] for part in (d, e))
            return dx * ey + ex * dy

        return Linear(pull, noise if shared is None else noise + shared * shared, push=push, bend=bend)

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="product", local=local)
    def propagate(x: Any, y: Any) -> Moments:
        mean = op(mean_of(x), mean_of(y))
        if is_moments(x) and is_moments(y):
            variance = x.variance * (y.variance + y.mean * y.mean) + x.mean * x.mean * y.variance
            shared = x.variance if x is y else None
            if shared is not None:
                variance = (variance + shared * (2 * mean + shared)).clamp_min(0)
                mean = mean + shared
            return Moments(mean, variance)
        squares = [f.variance if is_moments(f) else squared(f, mean.dtype) for f in (x, y)]
        random, constant = (x, y) if is_moments(x) else (y, x)
        return affine(Moments(mean, op(*squares)), random, constant)


_by_element(aten.mul.Tensor)
_by_element(aten.mul.Scalar)


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


def _matrix_moments(op: Any, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Mean and variance of a @ b."""
    mean = op(mean_of(a), mean_of(b))
    if not (is_moments(a) and is_moments(b)):
        return mean, op(*[f.variance if is_moments(f) else squared(f, mean.dtype) for f in (a, b)])
    variance = op(a.variance, b.mean * b.mean + b.variance) + op(a.mean * a.mean, b.variance)
    return mean, variance


def _matrix_local(op: Any, a: Any, b: Any, scale: float = 1) -> Linear:
    mean_a, mean_b, random_a, random_b = mean_of(a), mean_of(b), is_moments(a), is_moments(b)

    def pull(cotangent: Tensor) -> list[Tensor]:
        cotangent = cotangent if scale == 1 else cotangent * scale
        first = [_back_to_first(cotangent, mean_a, mean_b)] if random_a else []
        return [*first, _back_to_second(cotangent, mean_a, mean_b)] if random_b else first

    def push(*deviations: Tensor) -> Tensor | None:
        n = max(mean_a.dim(), mean_b.dim())
        if min(mean_a.dim(), mean_b.dim()) < 2:
            return None
        total: Any = 0.0
        if random_a:
            total = torch.matmul(_whole(deviations[0], mean_a, n), mean_b)
        if random_b:
            total = total + torch.matmul(mean_a, _whole(deviations[-1], mean_b, n))
        return total * scale

    if not (random_a and random_b):
        return Linear(pull, push=push)

    def bend(d: list[Tensor], e: list[Tensor]) -> Tensor:
        n = max(mean_a.dim(), mean_b.dim())
        da, ea = (_whole(v[0], mean_a, n) for v in (d, e))
        db, eb = (_whole(v[1], mean_b, n) for v in (d, e))
        return (torch.matmul(da, eb) + torch.matmul(ea, db)) * scale

    noise = op(a.variance, b.variance) * (scale * scale)
    return Linear(pull, noise, push=push, bend=bend if min(mean_a.dim(), mean_b.dim()) > 1 else None)


def _whole(deviations: Tensor, mean: Tensor, dim: int) -> Tensor:
    return lifted(deviations.expand(deviations.shape[0], *mean.shape), dim)


def _of_matrices(op: Any) -> None:
    def local(out: Moments, a: Any, b: Any) -> Linear:
        return _matrix_local(op, a, b)

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="product", local=local)
    def propagate(a: Any, b: Any) -> Moments:
        return Moments(*_matrix_moments(op, a, b))


for _op in (aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default):
    _of_matrices(_op)


def _affine_product(op: Any, mm: Any) -> None:
    """beta x + alpha (A @ B)."""

    def local(out: Moments, x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Linear:
        product, added, n = _matrix_local(mm, a, b, alpha), is_moments(x), out.mean.dim()
        shape = x.shape

        def pull(cotangent: Tensor) -> list[Tensor]:
            first = [gathered(cotangent, shape) * beta] if added else []
            return [*first, *product.pull(cotangent)]

        def push(*deviations: Tensor) -> Tensor | None:
            factors = deviations[1:] if added else deviations
            total = product.push(*factors) if factors and product.push is not None else 0.0
            if total is None or not added:
                return total  # type: ignore[return-value]
            return total + lifted(deviations[0], n) * beta

        def bend(d: list[Tensor], e: list[Tensor]) -> Tensor:
            assert product.bend is not None
            return product.bend(*[part[1:] if added else part for part in (d, e)])

        return Linear(pull, product.noise, push=push, bend=None if product.bend is None else bend)

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="product", local=local)
    def propagate(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Moments:
        mean = op(mean_of(x), mean_of(a), mean_of(b), beta=beta, alpha=alpha)
        variance = beta * beta * variance_of(x)
        if is_moments(a) or is_moments(b):
            variance = variance + alpha * alpha * _matrix_moments(mm, a, b)[1]
        return Moments(mean, broadcast(variance, mean))


_affine_product(aten.addmm.default, aten.mm.default)
_affine_product(aten.baddbmm.default, aten.bmm.default)
