"""var and std over dimensions of a tensor.

With D = E - mean(E) over n elements and correction c (1 by default),

    E[var] = (sum(D^2) + (1 - 1/n) sum(V)) / (n - c),    Var[var] = sum(4 D^2 V + 2 V^2) / (n - c)^2,

exact for independent Gaussians but for terms of order 1/n in the variance. std is the root of a positive
quantity with these moments (positive.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.positive import sqrt_response
from momentprop.moments import Moments
from momentprop.rules.linearization import Propagated, mapped
from momentprop.rules.reduction import dimensions
from momentprop.rules.registry import rule

aten = torch.ops.aten


def _variance(
    x: Moments, dim: Any, correction: float, keepdim: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, explained variance, noise, and the gradient of the mean, in the shape of x."""
    dims = dimensions(dim, x.mean.dim())
    n = math.prod(x.shape[d] for d in dims)
    rest = max(n - correction, 0)
    deviation = x.mean - x.mean.mean(dims, keepdim=True)
    mean = (deviation.square() + (1 - 1 / n) * x.variance).sum(dims, keepdim=keepdim) / rest
    explained = (4 * deviation.square() * x.variance).sum(dims, keepdim=keepdim) / rest**2
    noise = (2 * x.variance.square()).sum(dims, keepdim=keepdim) / rest**2
    return mean, explained, noise, deviation * (2 / rest)


def _rule(op: Any, root: bool) -> None:
    @rule(op, exactness="approximate: to order 1/n, if Gaussian", reference="second order")
    def propagate(
        x: Moments, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Propagated:
        mean, explained, noise, slope = _variance(x, dim, 1 if correction is None else correction, keepdim)
        variance = explained + noise
        dims = [] if keepdim else dimensions(dim, x.mean.dim())
        if root:
            mean, variance, gain = sqrt_response(mean, variance)
            wide = gain
            for d in dims:
                wide = wide.unsqueeze(d)
            slope, noise = slope * wide, (variance - gain * gain * explained).clamp_min(0)

        def pull(cotangent: Tensor) -> list[Tensor]:
            for d in dims:
                cotangent = cotangent.unsqueeze(d + 1)
            return [cotangent * slope]

        return Propagated(Moments(mean, variance), lambda: mapped(pull, noise))


_rule(aten.var.correction, root=False)
_rule(aten.std.correction, root=True)
