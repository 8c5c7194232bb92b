"""Random numbers drawn inside a network: Bernoulli masks, Gaussian and uniform noise.

Their elements are independent of each other and of everything before them, so mean and variance say all
that rules behind them need: Bernoulli(p) has p and p (1 - p), normal noise its mean and std^2, uniform
noise on [a, b] has (a + b) / 2 and (b - a)^2 / 12. Exact.

With a product they make further kinds of dropout: `x * bernoulli / keep` with one number per sample is
stochastic depth (Huang et al. 2016), `x * (1 + s * randn)` is Gaussian dropout (Srivastava et al. 2014).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments, is_moments, mean_of
from momentprop.rules.linearization import Linearization, Propagated, gathered, mapped, scaled, source
from momentprop.rules.registry import EXACT, Role, rule

aten = torch.ops.aten


def _fresh(out: Moments, like: Any) -> Propagated:
    """Noise of its own; a random tensor that lent its shape has no part in it."""
    if not is_moments(like):
        return Propagated(out, lambda: source(out.variance))
    return Propagated(out, lambda: mapped(lambda cotangent: [None], out.variance))


def _around(out: Moments, center: Any) -> Propagated:
    """Noise around a mean that may be random itself: whatever of the variance is not the mean's."""

    def linearize() -> Linearization:
        noise = (out.variance - center.variance).clamp_min(0)
        if out.shape == center.shape:
            return scaled(None, noise)
        return mapped(lambda cotangent: [gathered(cotangent, center.shape)], noise)

    return Propagated(out, linearize if is_moments(center) else lambda: source(out.variance))


def _source(*ops: Any, refuses: Any = None) -> Any:
    return rule(*ops, exactness=EXACT, reference="definition", role=Role.SOURCE, refuses=refuses)


def _constant_std(_: Any, random: frozenset[str]) -> str | None:
    return "normal noise whose std is random has no rule" if "std" in random else None


def _constant(mean: Tensor, variance: float) -> Moments:
    return Moments(mean, torch.full_like(mean, variance))


@_source(aten.bernoulli.p)
def bernoulli(like: Moments | Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    mean = torch.full_like(mean_of(like), p)
    return _fresh(_constant(mean, p * (1 - p)), like) if p != 0 else mean


@_source(aten.bernoulli.default)
def bernoulli_of(probability: Moments | Tensor, *, generator: Any = None) -> Propagated:
    """B^2 = B, so with random probabilities too E[B] = E[P] and V[B] = E[P] (1 - E[P])."""
    mean = mean_of(probability).clamp(0, 1)
    return _around(Moments(mean, mean * (1 - mean)), probability)


def _drawn(op: Any, full: Any, mean: float, variance: float) -> None:
    """`op` draws a tensor of given size, or like a given one, as `full` fills one."""

    @_source(op)
    def propagate(like: Any, **options: Any) -> Propagated:
        return _fresh(_constant(full(mean_of(like), mean, **options), variance), like)


_drawn(aten.randn.default, aten.full.default, 0.0, 1.0)
_drawn(aten.randn_like.default, aten.full_like.default, 0.0, 1.0)
_drawn(aten.rand.default, aten.full.default, 0.5, 1 / 12)
_drawn(aten.rand_like.default, aten.full_like.default, 0.5, 1 / 12)


@_source(aten.normal_functional.default)
def normal_functional(
    like: Moments | Tensor, mean: float = 0, std: float = 1, *, generator: Any = None
) -> Propagated:
    return _fresh(_constant(torch.full_like(mean_of(like), mean), std**2), like)


@_source(aten.normal.float_float)
def normal(mean: float, std: float, size: list[int], *, generator: Any = None, **options: Any) -> Propagated:
    return _fresh(_constant(aten.full.default(size, float(mean), **options), std**2), None)


@_source(
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
    refuses=_constant_std,
)
def normal_around(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Propagated:
    center, square = mean_of(mean), std * std
    if isinstance(std, Tensor):
        center = center + torch.zeros_like(std)  # either may be a number, or broadcast
    return _around(Moments(center, mean.variance + square if is_moments(mean) else square), mean)


@_source(aten.uniform.default)
def uniform(
    like: Moments | Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None
) -> Propagated:
    return _fresh(_constant(torch.full_like(mean_of(like), (low + high) / 2), (high - low) ** 2 / 12), like)
