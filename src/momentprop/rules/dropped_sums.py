"""Softmax, layer norm and RMS norm of dropped values.

A dropped value is 0 or x / (1-p). Of a Gaussian with these moments softmax is another one: its variance was
twice that of a dropped value's in a small network. gaussian/dropped_sums.py goes through the outcomes.

Each mask is one source of noise that reaches all outputs of its row. What the variance exceeds the responses
to masks and to x is noise of the output's own.

There are no such operators in PyTorch: graphs get these by passes/dropped/sums.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.dropped_sums import DroppedSums, dropped_sums, layer_norm, rms_norm, softmax
from momentprop.moments import Moments, is_moments, mean_of
from momentprop.rules.linearization import Linearization, Mapped, Propagated, Spread, mapped, source
from momentprop.rules.registry import RULES, Role, Variant, rule

aten = torch.ops.aten

_EXACTNESS = "approximate: exact in a value and its mask, sums over the others as log-normal or normal"

_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
torch.library.define(
    "momentprop::dropped_softmax", "(Tensor input, float p, int dim, bool log) -> Tensor", tags=_TAGS
)
torch.library.define(
    "momentprop::dropped_norm",
    "(Tensor input, float p, int[] normalized_shape, bool center, float eps) -> Tensor",
    tags=_TAGS,
)


@torch.library.impl("momentprop::dropped_softmax", "CompositeImplicitAutograd")
def _draw_softmax(x: Tensor, p: float, dim: int, log: bool) -> Tensor:
    op = aten.log_softmax.int if log else aten.softmax.int
    out: Tensor = op(aten.dropout.default(x, p, True), dim)
    return out


@torch.library.impl("momentprop::dropped_norm", "CompositeImplicitAutograd")
def _draw_norm(x: Tensor, p: float, shape: list[int], center: bool, eps: float) -> Tensor:
    dropped = aten.dropout.default(x, p, True)
    out: Tensor = (
        aten.layer_norm.default(dropped, shape, None, None, eps)
        if center
        else aten.rms_norm.default(dropped, shape, None, eps)
    )
    return out


@rule(
    torch.ops.momentprop.dropped_softmax.default,
    exactness=_EXACTNESS,
    reference="mixture of kept and dropped",
    role=Role.MASK,
)
def dropped_softmax(x: Any, p: float, dim: int, log: bool) -> Propagated:
    if log and is_moments(x):
        return _as_gaussian(x, p, aten.log_softmax.int, dim)
    axis = dim % mean_of(x).dim() - mean_of(x).dim()

    def rows(value: Tensor) -> Tensor:
        return value.movedim(axis, -1)

    mean, variance = rows(mean_of(x)), rows(x.variance) if is_moments(x) else None
    found = dropped_sums(softmax(log), mean, variance, p)
    return _answer(p, found, variance, rows, lambda value: value.movedim(-1, axis))


@rule(
    torch.ops.momentprop.dropped_softmax.default,
    variant=Variant.CONTRAST,
    exactness=_EXACTNESS + "; random ones as Gaussians, dropped or not",
    reference="mixture of kept and dropped",
    role=Role.MASK,
)
def cheap_dropped_softmax(x: Any, p: float, dim: int, log: bool) -> Propagated:
    if not is_moments(x):
        return dropped_softmax(x, p, dim, log)
    return _as_gaussian(x, p, aten.log_softmax.int if log else aten.softmax.int, dim)


@rule(
    torch.ops.momentprop.dropped_norm.default,
    exactness=_EXACTNESS + "; random ones as Gaussians, dropped or not",
    reference="mixture of kept and dropped",
    role=Role.MASK,
)
def dropped_norm(x: Any, p: float, normalized_shape: list[int], center: bool, eps: float) -> Propagated:
    """Values are taken in units of the largest one: their fourth powers would leave the range of floats."""
    if is_moments(x):
        return norm_of_gaussians(x, p, normalized_shape, center, eps)

    def rows(value: Tensor) -> Tensor:
        return value.flatten(-len(normalized_shape))

    values = rows(x)
    least = max(eps, torch.finfo(x.dtype).tiny ** 0.5) ** 0.5
    unit = (values.detach().abs().amax(-1, keepdim=True) / (1 - p)).clamp_min(least)
    kind = (layer_norm if center else rms_norm)(eps / unit / unit)
    found = dropped_sums(kind, values / unit, None, p)
    return _answer(p, found, None, rows, lambda value: value.unflatten(-1, normalized_shape))


@rule(
    torch.ops.momentprop.dropped_norm.default,
    variant=Variant.CONTRAST,
    exactness="approximate: of Gaussians with the moments of dropped values",
    reference="second order",
    role=Role.MASK,
)
def norm_of_gaussians(x: Any, p: float, normalized_shape: list[int], center: bool, eps: float) -> Propagated:
    """It costs a third, and for variances alone it is as good."""
    if center:
        return _as_gaussian(x, p, aten.layer_norm.default, normalized_shape, None, None, eps)
    return _as_gaussian(x, p, aten.rms_norm.default, normalized_shape, None, eps)


def _as_gaussian(x: Any, p: float, op: Any, *arguments: Any) -> Propagated:
    """The rules of dropout and of the operator, one behind the other."""
    first, then = RULES.find(aten.dropout.default), RULES.find(op)
    assert first is not None
    assert then is not None
    dropped = first.propagate(x, p, True)
    found = then.propagate(dropped.moments, *arguments)

    def linearize() -> Linearization:
        assert found.linearize is not None
        assert dropped.linearize is not None
        outer, inner = found.linearize(), dropped.linearize()
        transposed = outer.map
        assert isinstance(transposed, Mapped)

        def pull(cotangent: Tensor) -> list[Tensor]:
            (within,) = transposed.pull(cotangent)
            return [within, within] if is_moments(x) else [within]

        return mapped(pull, *outer.noise, inner=inner.noise)

    # as softmax of these it would have logits that are no output of the graph
    return Propagated(Moments(found.moments.mean, found.moments.variance), linearize)


def _answer(
    p: float,
    found: DroppedSums,
    variance: Tensor | None,
    rows: Callable[[Tensor], Tensor],
    back: Callable[[Tensor], Tensor],
) -> Propagated:
    """Put together moments and linear part; `rows` brings elements to the last dimension."""

    def linearize() -> Linearization:
        masks, gains = found.linear()
        drops = Spread(lambda c: back(masks.along(rows(c)) * math.sqrt(p * (1 - p))), p)
        noise = found.variance - masks.variance(p * (1 - p))
        if gains is None:
            return source(back(noise.clamp_min(0)), drops)
        noise = (noise - gains.variance(variance)).clamp_min(0)
        return mapped(lambda c: [back(gains.along(rows(c)))], back(noise), drops)

    return Propagated(Moments(back(found.mean), back(found.variance)), linearize)
