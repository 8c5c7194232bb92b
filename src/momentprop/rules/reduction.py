"""sum, mean, cumsum: sums of elements, whose variances add."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments
from momentprop.rules.facts import knowing, variance_within
from momentprop.rules.linearization import Propagated, Pull, mapped
from momentprop.rules.registry import EXACT_IF_UNCORRELATED, rule

aten = torch.ops.aten


def dimensions(dim: Any, n: int) -> list[int]:
    """The dimensions a reduction runs over, none given meaning all of them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(n))
    return sorted(d % max(n, 1) for d in ([dim] if isinstance(dim, int) else dim))


def _back(x: Moments, dim: Any, keepdim: bool, divisor: Any) -> Pull:
    """Every element of a sum takes the sum's cotangent."""
    shape, kind = x.shape, x.dtype
    dims = [] if keepdim else dimensions(dim, len(shape))

    def pull(cotangent: Tensor) -> list[Tensor]:
        for d in dims:
            cotangent = cotangent.unsqueeze(d + 1)
        return [cotangent.to(kind).expand(cotangent.shape[0], *shape) / divisor]

    return pull


@rule(aten.sum.default, aten.sum.dim_IntList, exactness=EXACT_IF_UNCORRELATED, reference="linear")
def sum_(x: Moments, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Propagated:
    """Variance: the sum of the variances."""
    out = torch.sum(x.mean, dim, keepdim, dtype=dtype)
    return _reduced(x, out, dim, keepdim, lambda v: torch.sum(v, dim, keepdim, dtype=dtype), 1)


@rule(aten.mean.default, aten.mean.dim, exactness=EXACT_IF_UNCORRELATED, reference="linear")
def mean(x: Moments, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Propagated:
    """Variance: the mean of the variances, divided by the number of elements."""
    out = torch.mean(x.mean, dim, keepdim, dtype=dtype)
    count = math.prod([x.shape[d] for d in dimensions(dim, x.mean.dim())])  # a list: compilers take it
    return _reduced(x, out, dim, keepdim, lambda v: torch.mean(v, dim, keepdim, dtype=dtype), count)


def _reduced(
    x: Moments, out: Tensor, dim: Any, keepdim: bool, reduce: Callable[[Tensor], Tensor], count: Any
) -> Propagated:
    """Reduce x; what elements of a channel share is known where only those are added up."""
    if min(dimensions(dim, x.mean.dim()), default=0) < 2:
        moments = Moments(out, reduce(x.variance) / count)
    else:
        variance, shared = variance_within(x, lambda v: reduce(v) / count, reduce)
        moments = knowing(Moments(out, variance), shared)
    return Propagated(moments, lambda: mapped(_back(x, dim, keepdim, count)))


@rule(aten.col2im.default, exactness=EXACT_IF_UNCORRELATED, reference="linear")
def col2im(x: Moments, output_size: Any, *sizes: Any) -> Propagated:
    """F.fold: overlapping blocks add up, and so do their variances."""
    shape = x.shape
    out = Moments(*[aten.col2im.default(v, output_size, *sizes) for v in (x.mean, x.variance)])

    def pull(cotangent: Tensor) -> list[Tensor]:
        images = cotangent.reshape(-1, *cotangent.shape[-3:])
        return [aten.im2col.default(images, *sizes).reshape(cotangent.shape[0], *shape)]

    return Propagated(out, lambda: mapped(pull))


@rule(aten.cumsum.default, exactness=EXACT_IF_UNCORRELATED, reference="linear")
def cumsum(x: Moments, dim: int, *, dtype: Any = None) -> Propagated:
    """An element is part of every sum from its own on."""
    kind, d = x.dtype, [1 + dim % max(x.mean.dim(), 1)]
    out = Moments(torch.cumsum(x.mean, dim, dtype=dtype), torch.cumsum(x.variance, dim, dtype=dtype))
    return Propagated(out, lambda: mapped(lambda c: [c.to(kind).flip(d).cumsum(d[0]).flip(d)]))
