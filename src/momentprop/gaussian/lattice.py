"""The distribution of an output that jumps: a mixture of normals whose means lie on a lattice.

Of independent sources that are dropped or not, every sum of effects has its probability. There are 2^m of
them, but they need not be told apart more finely than the rest of the noise blurs them. So means are the
points of a lattice of step h, from the lowest sum to the highest, and sources come in one after the other:
with probability p all weights move by the effect, where it falls between two points to both of them, in such
shares that the mean is right,

    w_k <- (1-p) w_k + p ((1-t) w_{k-n} + t w_{k-n-1}),    effect / h = n + t.

Nothing is subtracted, so far tails have the relative precision of their numbers, in float32 too; a Fourier
inversion of the product of characteristic functions would leave rounding errors there. What is not jumps is
the variance of the normals. Mean and variance of the mixture are exactly those of the output.

Measured on networks of UCI sets (p = 0.005 .. 0.1), test NLL less that of MC dropout's mixture with
T = 300,000, as one normal and by 16 jumps: Yacht -0.41, 0.02; Energy 0.08, 0.00; Naval 0.11, 0.01; Boston
0.00, 0.00. With 8 jumps Yacht is 0.05 off; with 24 it is no closer than with 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from momentprop.gaussian.normal import safe_sqrt
from momentprop.moments import Moments

_POINTS = 256  # and a few at both ends
_AT_ONCE = 6  # sources that may drop together, and six standard deviations more


def spread_out(moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Means [points, *shape], variances and weights of the normals that an output with jumps consists of."""
    jumps, variance = moments.jumps, moments.variance
    assert jumps is not None
    tiny = torch.finfo(variance.dtype).tiny ** 0.8
    above, below = _reach(jumps.effects, jumps.variance), _reach(-jumps.effects, jumps.variance)
    step = ((above + below) / _POINTS).clamp_min(tiny)
    margin = len(jumps.effects) + 1  # shares of every source reach one point further
    origin = (below / step).floor() + margin  # nothing dropped
    points = torch.arange(_POINTS + 2 * margin, device=step.device).reshape(-1, *[1] * step.dim())
    weights = (points == origin).to(step.dtype)
    for effect, p in zip(jumps.effects.unbind(), jumps.probabilities.unbind(), strict=True):
        weights = torch.lerp(weights, _shifted(weights, effect / step, points), p)
    weights = weights / weights.sum(0)
    heights = points * step
    heights = heights - (weights * heights).sum(0)
    own = (weights * heights.square()).sum(0)
    # normals at least half a step wide leave no gaps; the lattice shrinks by as much as they take
    rest = torch.maximum(variance - own, (step * step / 4).minimum(variance))
    shrunk = ((variance - rest) / own.clamp_min(tiny)).clamp_min(tiny).sqrt()
    means = moments.mean + heights * shrunk
    return means, rest.expand_as(means), weights


def _reach(effects: Tensor, variance: Tensor) -> Tensor:
    """Bound how far up sums of effects go: all the way, or as far as matters."""
    ups = effects.clamp_min(0)
    few = ups.topk(min(_AT_ONCE, len(ups)), 0).values.sum(0) + 6 * safe_sqrt(variance)
    return torch.minimum(ups.sum(0), few)


def _shifted(weights: Tensor, distance: Tensor, points: Tensor) -> Tensor:
    """The weights moved up by so many steps."""
    whole = distance.detach().floor()
    zero = torch.zeros_like(weights[:1])
    before = torch.cat([zero, weights[:-1]])
    blurred = torch.lerp(weights, before, distance - whole)
    source = (points - whole.long() + 1).clamp(0, len(points) + 1)
    return torch.cat([zero, blurred, zero]).gather(0, source)
