"""sum, mean, cumsum: sums of elements, whose variances add."""

from __future__ import annotations

from typing import Any

import torch

from momentprop.moments import Moments
from momentprop.registry import EXACT_IF_UNCORRELATED, rule

aten = torch.ops.aten


@rule(
    aten.sum.default,
    aten.sum.dim_IntList,
    exactness=EXACT_IF_UNCORRELATED,
    reference="linear",
    acts="linear",
)
def sum_(x: Moments, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Moments:
    """Variance: the sum of the variances."""
    return Moments(
        torch.sum(x.mean, dim, keepdim, dtype=dtype), torch.sum(x.variance, dim, keepdim, dtype=dtype)
    )


@rule(aten.mean.default, aten.mean.dim, exactness=EXACT_IF_UNCORRELATED, reference="linear", acts="linear")
def mean(x: Moments, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Moments:
    """Variance: the mean of the variances, divided by the number of elements."""
    out = torch.mean(x.mean, dim, keepdim, dtype=dtype)
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        count = x.mean.numel()
    else:
        count = 1
        for d in [dim] if isinstance(dim, int) else dim:
            count = count * x.mean.shape[d]
    return Moments(out, torch.mean(x.variance, dim, keepdim, dtype=dtype) / count)


@rule(aten.col2im.default, exactness=EXACT_IF_UNCORRELATED, reference="linear", acts="linear")
def col2im(x: Moments, *sizes: Any) -> Moments:
    """F.fold: overlapping blocks add up, and so do their variances."""
    return Moments(aten.col2im.default(x.mean, *sizes), aten.col2im.default(x.variance, *sizes))


@rule(aten.cumsum.default, exactness=EXACT_IF_UNCORRELATED, reference="linear", acts="linear")
def cumsum(x: Moments, dim: int, *, dtype: Any = None) -> Moments:
    return Moments(torch.cumsum(x.mean, dim, dtype=dtype), torch.cumsum(x.variance, dim, dtype=dtype))
