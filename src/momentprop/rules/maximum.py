"""Maxima and minima: of two tensors, and over dimensions of one.

Of two, Clark's formulas (gaussian/normal.py), exact for independent Gaussians. Over n elements, a tournament
(gaussian/tournament.py). To first order the maximum is the sum of the elements, weighted by their chances to
win.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.normal import max_response
from momentprop.gaussian.tournament import tournament
from momentprop.moments import Moments, mean_of, variance_of
from momentprop.rules.families import shape_query
from momentprop.rules.linearization import Propagated, mapped, weighted_inputs
from momentprop.rules.registry import EXACT_IF_GAUSSIAN, rule

aten = torch.ops.aten


def _of_two(op: Any, sign: int) -> None:
    """sign * max(sign x, sign y)."""

    @rule(op, exactness=EXACT_IF_GAUSSIAN, reference="Clark 1961")
    def propagate(x: Any, y: Any) -> Propagated:
        parts = [mean_of(x) * sign, variance_of(x), mean_of(y) * sign, variance_of(y)]
        mean, variance, wins = max_response(*torch.broadcast_tensors(*parts))
        out = Moments(mean * sign, variance)
        return Propagated(out, lambda: weighted_inputs(out, (x, wins), (y, 1 - wins)))


_of_two(aten.maximum.default, 1)
_of_two(aten.max.other, 1)
_of_two(aten.fmax.default, 1)
_of_two(aten.minimum.default, -1)
_of_two(aten.min.other, -1)
_of_two(aten.fmin.default, -1)


def _over_dimensions(op: Any, sign: int) -> None:
    def dims_of(x: Moments, dim: Any) -> list[int]:
        n = x.mean.dim()
        given = [dim] if isinstance(dim, int) else list(dim)
        return sorted(d % n for d in given) or list(range(n))

    @rule(
        op,
        exactness="approximate: winners of a round are taken as Gaussian for the next",
        reference="Clark 1961",
    )
    def propagate(x: Moments, dim: Any = (), keepdim: bool = False) -> Propagated:
        dims = dims_of(x, dim)
        kept = [d for d in range(x.mean.dim()) if d not in dims]
        order = [*kept, *dims]
        inner = [x.shape[d] for d in dims]
        rows = [t.permute(order).flatten(len(kept)) for t in (x.mean * sign, x.variance)]
        mean, variance, weights = tournament(*rows)
        explained = (weights * weights * rows[1]).sum(-1)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        spread = weights.unflatten(-1, inner).permute(inverse)
        shape = [1 if d in dims else x.shape[d] for d in range(x.mean.dim())]
        parts = [t.reshape(shape) if keepdim else t for t in (mean * sign, variance, explained)]

        def pull(cotangent: Tensor) -> list[Tensor]:
            if not keepdim:
                for d in dims:
                    cotangent = cotangent.unsqueeze(d + 1)
            return [cotangent * spread]

        out = Moments(parts[0], parts[1])
        return Propagated(out, lambda: mapped(pull, (out.variance - parts[2]).clamp_min(0)))


_over_dimensions(aten.amax.default, 1)
_over_dimensions(aten.amin.default, -1)

# Which element wins is taken from the means. The values are read through other operators
# (passes/canonical/results.py).
shape_query(
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.max_pool1d_with_indices.default,
    aten.adaptive_max_pool1d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
)
