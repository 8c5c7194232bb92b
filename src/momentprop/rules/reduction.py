"""sum, mean, cumsum: sums of elements, whose variances add."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments
from momentprop.rules.local import Linear
from momentprop.rules.registry import EXACT_IF_UNCORRELATED, rule
from momentprop.rules.shared import share, variance_within

aten = torch.ops.aten


def dimensions(dim: Any, n: int) -> list[int]:
    """The dimensions a reduction runs over, none given meaning all of them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(n))
    return sorted(d % max(n, 1) for d in ([dim] if isinstance(dim, int) else dim))


def _count(x: Moments, dim: Any) -> Any:
    return math.prod([x.shape[d] for d in dimensions(dim, x.mean.dim())])  # a list: compilers take it


def _spread(scale: Callable[[Moments, Any], Any]) -> Callable[..., Linear]:
    """Every element of a sum takes the sum's cotangent."""

    def local(
        out: Moments, x: Moments, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Linear:
        shape, kind, divisor = x.shape, x.dtype, scale(x, dim)
        dims = [] if keepdim else dimensions(dim, x.mean.dim())

        def pull(cotangent: Tensor) -> list[Tensor]:
            for d in dims:
                cotangent = cotangent.unsqueeze(d + 1)
            return [cotangent.to(kind).expand(cotangent.shape[0], *shape) / divisor]

        return Linear(pull)

    return local


@rule(
    aten.sum.default,
    aten.sum.dim_IntList,
    exactness=EXACT_IF_UNCORRELATED,
    reference="linear",
    local=_spread(lambda x, dim: 1),
)
def sum_(x: Moments, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Moments:
    """Variance: the sum of the variances."""
    out = torch.sum(x.mean, dim, keepdim, dtype=dtype)
    return _reduced(x, out, dim, lambda v: torch.sum(v, dim, keepdim, dtype=dtype))


@rule(
    aten.mean.default,
    aten.mean.dim,
    exactness=EXACT_IF_UNCORRELATED,
    reference="linear",
    local=_spread(_count),
)
def mean(x: Moments, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Moments:
    """Variance: the mean of the variances, divided by the number of elements."""
    out = torch.mean(x.mean, dim, keepdim, dtype=dtype)
    return _reduced(x, out, dim, lambda v: torch.mean(v, dim, keepdim, dtype=dtype), _count(x, dim))


def _reduced(
    x: Moments, out: Tensor, dim: Any, reduce: Callable[[Tensor], Tensor], count: Any = 1
) -> Moments:
    """Where only what elements of a channel share is added up, that is known (shared.py)."""
    if min(dimensions(dim, x.mean.dim()), default=0) < 2:
        return Moments(out, reduce(x.variance) / count)
    variance, direction = variance_within(x, lambda v: reduce(v) / count, reduce)
    return share(Moments(out, variance), direction)


def _unfolded(out: Moments, x: Moments, output_size: Any, *sizes: Any) -> Linear:
    def pull(cotangent: Tensor) -> list[Tensor]:
        images = cotangent.reshape(-1, *cotangent.shape[-3:])
        return [aten.im2col.default(images, *sizes).reshape(cotangent.shape[0], *x.shape)]

    return Linear(pull)


@rule(aten.col2im.default, exactness=EXACT_IF_UNCORRELATED, reference="linear", local=_unfolded)
def col2im(x: Moments, *sizes: Any) -> Moments:
    """F.fold: overlapping blocks add up, and so do their variances."""
    return Moments(aten.col2im.default(x.mean, *sizes), aten.col2im.default(x.variance, *sizes))


def _sums_of_the_rest(out: Moments, x: Moments, dim: int, *, dtype: Any = None) -> Linear:
    """An element is part of every sum from its own on."""

    def pull(cotangent: Tensor) -> list[Tensor]:
        d = [1 + dim % x.mean.dim()]
        return [cotangent.to(x.dtype).flip(d).cumsum(d[0]).flip(d)]

    return Linear(pull)


@rule(aten.cumsum.default, exactness=EXACT_IF_UNCORRELATED, reference="linear", local=_sums_of_the_rest)
def cumsum(x: Moments, dim: int, *, dtype: Any = None) -> Moments:
    return Moments(torch.cumsum(x.mean, dim, dtype=dtype), torch.cumsum(x.variance, dim, dtype=dtype))
