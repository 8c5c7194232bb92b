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
from momentprop.rules.families import affine, broadcast, squared
from momentprop.rules.linearization import Linearization, Propagated, Pull, gathered, mapped
from momentprop.rules.registry import EXACT_IF_UNCORRELATED, rule

aten = torch.ops.aten


def _by_element(op: Any) -> None:
    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="product")
    def propagate(x: Any, y: Any) -> Propagated:
        mean = op(mean_of(x), mean_of(y))
        if is_moments(x) and is_moments(y):
            return _of_two_random(mean, x, y)
        squares = [f.variance if is_moments(f) else squared(f, mean.dtype) for f in (x, y)]
        random, constant = (x, y) if is_moments(x) else (y, x)
        return affine(Moments(mean, op(*squares)), random, constant)


def _of_two_random(mean: Tensor, x: Moments, y: Moments) -> Propagated:
    variance = x.variance * (y.variance + y.mean * y.mean) + x.mean * x.mean * y.variance
    shared = x.variance if x is y else None
    if shared is not None:
        variance = (variance + shared * (2 * mean + shared)).clamp_min(0)
        mean = mean + shared
    mean_x, mean_y = x.mean, y.mean

    def pull(cotangent: Tensor) -> list[Tensor]:
        return [gathered(cotangent * mean_y, mean_x.shape), gathered(cotangent * mean_x, mean_y.shape)]

    def linearize() -> Linearization:
        noise = x.variance * y.variance
        return mapped(pull, noise if shared is None else noise + shared * shared)

    return Propagated(Moments(mean, variance), linearize)


_by_element(aten.mul.Tensor)
_by_element(aten.mul.Scalar)


def _back_to_first(cotangent: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Pull a cotangent [K, *(a @ b).shape] back to a."""
    if b.dim() == 1:
        back = cotangent[..., None] * b  # a @ b lost its last dimension
    elif a.dim() == 1:
        back = torch.matmul(cotangent[..., None, :], b.mT)[..., 0, :]
    else:
        back = torch.matmul(cotangent, b.mT)
    return gathered(back, a.shape)


def _back_to_second(cotangent: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Pull a cotangent [K, *(a @ b).shape] back to b."""
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


def _back(a: Any, b: Any, scale: float = 1) -> Pull:
    mean_a, mean_b, random_a, random_b = mean_of(a), mean_of(b), is_moments(a), is_moments(b)

    def pull(cotangent: Tensor) -> list[Tensor]:
        cotangent = cotangent if scale == 1 else cotangent * scale
        first = [_back_to_first(cotangent, mean_a, mean_b)] if random_a else []
        return [*first, _back_to_second(cotangent, mean_a, mean_b)] if random_b else first

    return pull


def _noise(op: Any, a: Any, b: Any, scale: float = 1) -> Tensor | None:
    """Return what a product of two random matrices adds beyond first order."""
    if not (is_moments(a) and is_moments(b)):
        return None
    found: Tensor = op(a.variance, b.variance) * (scale * scale)
    return found


def _of_matrices(op: Any) -> None:
    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="product")
    def propagate(a: Any, b: Any) -> Propagated:
        out = Moments(*_matrix_moments(op, a, b))
        return Propagated(out, lambda: mapped(_back(a, b), _noise(op, a, b)))


for _op in (aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default):
    _of_matrices(_op)


def _affine_product(op: Any, mm: Any) -> None:
    """beta x + alpha (A @ B)."""

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="product")
    def propagate(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Propagated:
        mean = op(mean_of(x), mean_of(a), mean_of(b), beta=beta, alpha=alpha)
        variance = beta * beta * variance_of(x)
        if is_moments(a) or is_moments(b):
            variance = variance + alpha * alpha * _matrix_moments(mm, a, b)[1]
        added, shape = is_moments(x), x.shape

        def linearize() -> Linearization:
            product = _back(a, b, alpha)

            def pull(cotangent: Tensor) -> list[Tensor]:
                first = [gathered(cotangent, shape) * beta] if added else []
                return [*first, *product(cotangent)]

            return mapped(pull, _noise(mm, a, b, alpha))

        return Propagated(Moments(mean, broadcast(variance, mean)), linearize)


_affine_product(aten.addmm.default, aten.mm.default)
_affine_product(aten.baddbmm.default, aten.bmm.default)
