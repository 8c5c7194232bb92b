"""Maxima and minima: of two tensors, and over dimensions of one.

Of two, Clark's formulas (gaussian/normal.py), exact for independent Gaussians. Over n elements, a tournament:
the maximum of two halves, of two halves of the winners, and so on, each taken as Gaussian for the next round.
To first order the maximum is the sum of the elements, weighted by their chances to win.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.normal import max_response
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


def _tournament(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of the maximum over the last dimension, and every element's chance, [..., n]."""
    chances = torch.ones_like(mean)[..., None, :]  # [..., n, 1] after the first round, then twice as long
    chances = chances.mT
    while mean.shape[-1] > 1:
        half = mean.shape[-1] // 2
        pairs = [t[..., :half] for t in (mean, variance)] + [
            t[..., half : 2 * half] for t in (mean, variance)
        ]
        won = max_response(*pairs)
        wins = won[2][..., None]
        first, second = chances[..., :half, :] * wins, chances[..., half : 2 * half, :] * (1 - wins)
        merged = torch.cat([first, second], -1)
        rest_mean, rest_variance = mean[..., 2 * half :], variance[..., 2 * half :]
        if rest_mean.shape[-1]:  # one without a partner goes on, its chances padded
            rest = chances[..., 2 * half :, :]
            merged = torch.cat([merged, torch.nn.functional.pad(rest, (0, rest.shape[-1]))], -2)
        mean = torch.cat([won[0], rest_mean], -1)
        variance = torch.cat([won[1], rest_variance], -1)
        chances = merged
    return mean[..., 0], variance[..., 0], chances[..., 0, :]


def _order(n: int) -> list[int]:
    """Tell which element each place of a tournament's chances belongs to; -1 where there is none."""
    places: list[list[int]] = [[i] for i in range(n)]
    while len(places) > 1:
        half = len(places) // 2
        merged = [places[i] + places[half + i] for i in range(half)]
        if len(places) % 2:
            merged.append(places[-1] + [-1] * len(places[-1]))
        places = merged
    return places[0]


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
        mean, variance, chances = _tournament(*rows)
        places = _order(rows[0].shape[-1])
        index = [places.index(i) for i in range(rows[0].shape[-1])]
        weights = chances[..., index]
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
