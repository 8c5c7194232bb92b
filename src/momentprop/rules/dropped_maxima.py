"""Maxima of dropped values: over pooling windows, and over dimensions.

A dropped value is 0 or x / (1-p). No Gaussian resembles that, least of all where several compete: of nine
equal values, each dropped with p = 0.3, the maximum is that value nearly always, while that of nine Gaussians
of the same moments is far above and varies. dropped_maximum.py goes through the elements in their order.

Seen from other variables, the maximum moves with the mask of an element by E[M | kept] - E[M | dropped]: one
source of noise per mask, which reaches all windows that hold the element. It moves with x_k by the chance
that x_k is the maximum. What the variance exceeds both is noise of the output's own.

There are no such operators in PyTorch: graphs get these by passes/dropped/maxima.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.dropped_maximum import DroppedMaximum, dropped_maximum
from momentprop.graph.ops import MAX_POOLS
from momentprop.moments import Moments, is_moments, mean_of
from momentprop.rules.facts import Contrast
from momentprop.rules.linearization import Linearization, Propagated, Spread, mapped, source
from momentprop.rules.max_pooling import Elements, to_elements
from momentprop.rules.reduction import dimensions
from momentprop.rules.registry import RULES, Role, Variant, rule
from momentprop.rules.windows import Windows

aten = torch.ops.aten

_EXACTNESS = "exact for known values; random ones are compared as Gaussians, ordered by their means"
_FEW = 4
_CORRELATED = 16  # elements of a window, of which each two are asked for their covariance

_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
torch.library.define(
    "momentprop::dropped_max_pool",
    "(Tensor input, float p, int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode)"
    " -> Tensor",
    tags=_TAGS,
)
torch.library.define(
    "momentprop::dropped_amax", "(Tensor input, float p, int[] dim, bool keepdim) -> Tensor", tags=_TAGS
)


@torch.library.impl("momentprop::dropped_max_pool", "CompositeImplicitAutograd")
def _draw_pool(x: Tensor, p: float, kernel: list[int], *geometry: Any) -> Tensor:
    out: Tensor = _pool_of(kernel)(aten.dropout.default(x, p, True), kernel, *geometry)
    return out


def _pool_of(kernel: list[int]) -> Any:
    (op,) = [op for op, n in MAX_POOLS.items() if n == len(kernel)]
    return op


@torch.library.impl("momentprop::dropped_amax", "CompositeImplicitAutograd")
def _draw_amax(x: Tensor, p: float, dim: list[int], keepdim: bool) -> Tensor:
    out: Tensor = aten.amax.default(aten.dropout.default(x, p, True), dim, keepdim)
    return out


@rule(
    torch.ops.momentprop.dropped_max_pool.default,
    exactness=_EXACTNESS,
    reference="Clark 1961",
    role=Role.MASK,
)
def dropped_max_pool(
    x: Any,
    p: float,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> Propagated:
    n = len(kernel_size)
    windows = Windows.of(x.shape[-n:], kernel_size, stride, padding, dilation, ceil_mode)
    given = x if is_moments(x) else Moments(x, torch.zeros_like(x))
    elements = Elements.of(given, windows, correlated=len(windows.positions) <= _CORRELATED)
    means, variances = (torch.stack(list(parts)) for parts in zip(*elements.moments.values(), strict=True))
    found = dropped_maximum(
        means,
        variances if is_moments(x) else None,
        p,
        correlation=_correlation(given, windows, elements),
        absent=None if windows.inside else torch.finfo(means.dtype).min / 4,
    )

    def back(weights: Tensor) -> Callable[[Tensor], Tensor]:
        return to_elements(given.mean, windows, dict(zip(windows.positions, weights, strict=True)))

    def explained(gains: Tensor) -> Tensor:
        return windows.close(elements.variance_of_sum(dict(zip(windows.positions, gains, strict=True))))

    return _answer(x, p, found, windows.close, back, explained)


@rule(
    torch.ops.momentprop.dropped_max_pool.default,
    variant=Variant.CONTRAST,
    exactness=_EXACTNESS + "; up to four random ones as Gaussians, dropped or not",
    reference="Clark 1961",
    role=Role.MASK,
)
def cheap_dropped_max_pool(x: Any, p: float, kernel_size: list[int], *geometry: Any) -> Any:
    """Of few random values the Gaussians with the moments of dropped values, which cost half as much."""
    if not is_moments(x) or math.prod(kernel_size) > _FEW:
        return dropped_max_pool(x, p, kernel_size, *geometry)
    dropout = RULES.find(aten.dropout.default)
    pool = RULES.find(_pool_of(kernel_size), (Variant.CONTRAST,))
    assert dropout is not None
    assert pool is not None
    return pool(dropout(x, p, True), kernel_size, *geometry)


@rule(
    torch.ops.momentprop.dropped_amax.default,
    exactness=_EXACTNESS,
    reference="Clark 1961",
    role=Role.MASK,
)
def dropped_amax(x: Any, p: float, dim: list[int], keepdim: bool) -> Propagated:
    n_dims = mean_of(x).dim()
    dims = dimensions(dim, n_dims)
    kept = [d for d in range(n_dims) if d not in dims]
    shape = [1 if d in dims else x.shape[d] for d in range(n_dims)] if keepdim else [x.shape[d] for d in kept]

    def rows(value: Tensor) -> Tensor:
        return value.permute([*dims, *kept]).flatten(0, len(dims) - 1)

    variances = rows(x.variance) if is_moments(x) else None
    found = dropped_maximum(rows(mean_of(x)), variances, p)
    inner, inverse = [x.shape[d] for d in dims], sorted(range(n_dims), key=[*dims, *kept].__getitem__)

    def back(weights: Tensor) -> Callable[[Tensor], Tensor]:
        spread = weights.unflatten(0, inner).permute(inverse)

        def pull(cotangent: Tensor) -> Tensor:
            if not keepdim:
                for d in dims:
                    cotangent = cotangent.unsqueeze(d + 1)
            return cotangent * spread

        return pull

    def explained(gains: Tensor) -> Tensor:
        assert variances is not None
        return (gains * gains * variances).sum(0).reshape(shape)

    # the sweep tells samples apart by the dimensions of the output: those that are gone come last
    order = [0, *[1 + d for d in kept], *[1 + d for d in dims]]
    return _answer(x, p, found, lambda v: v.reshape(shape), back, explained, None if keepdim else order)


def _answer(
    x: Any,
    p: float,
    found: DroppedMaximum,
    close: Callable[[Tensor], Tensor],
    back: Callable[[Tensor], Callable[[Tensor], Tensor]],
    explained: Callable[[Tensor], Tensor],
    order: list[int] | None = None,
) -> Propagated:
    """Put together moments and linear part; `back` makes a transposed map of weights of the elements."""
    out = Moments(close(found.mean), close(found.variance))

    def linearize() -> Linearization:
        responses, gains = found.linear()
        responses = responses * math.sqrt(p * (1 - p))
        noise, reach = out.variance - close(responses.square().sum(0)), back(responses)

        def along(cotangent: Tensor) -> Tensor:
            rows = reach(cotangent)
            return rows if order is None else rows.permute(order)

        drops = Spread(along, p)
        if gains is None:
            return source(noise.clamp_min(0), drops)
        pull = back(gains)
        return mapped(lambda c: [pull(c)], (noise - explained(gains)).clamp_min(0), drops)

    return Propagated(out, linearize)


def _correlation(x: Moments, windows: Windows, elements: Elements) -> Tensor | None:
    """The correlation of the elements of a window, on average over all pairs, where x tells."""
    n = len(windows.positions)
    if elements.covariances:
        total: Any = sum(elements.covariances.values())
        alone: Any = sum(variance for _, variance in elements.moments.values())
        floor = torch.finfo(x.dtype).tiny
        return (total / (alone * ((n - 1) / 2)).clamp_min(floor)).clamp(0, 1)
    contrast = x.fact(Contrast)
    if contrast is None or n == 1 or n > _CORRELATED:
        return None
    shifts = [
        [d * (b - a) for d, a, b in zip(windows.dilation, first, second, strict=True)]
        for first, second in combinations(windows.positions, 2)
    ]
    return (1 - windows.view(contrast.told(shifts)) / 2).clamp(0, 1)
