"""Averages operators that work element by element over a grid of points."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.quadrature import Nodes, expectation
from momentprop.moments import Moments, is_moments, mean_of
from momentprop.passes.stand_ins.site import Site, StandIn
from momentprop.rules.linearization import Linearization, Propagated, gathered, mapped, scaled


def trapezoid(pairs: int, reach: float) -> Nodes:
    """(z, weight) of equidistant points of a standard normal variable, from 0 to about `reach`.

    For smooth functions the trapezoidal rule converges as fast as Gauss-Hermite quadrature. At kinks and
    jumps, which are not rare among operators without a rule, it is closer. The square of z is 1 on average.
    """
    z = [reach * (i + 1) / pairs for i in range(pairs)]
    density = [math.exp(-x * x / 2) for x in z]
    total = 1 + 2 * sum(density)
    scale = math.sqrt(2 * sum(d * x * x for d, x in zip(density, z, strict=True)) / total)
    return tuple((x / scale, d / total) for x, d in zip(z, density, strict=True))


# along each of one, two, or more random inputs: 61, 9 x 9, 3 x 3 x 3 ... points
_NODES = (trapezoid(30, 5.0), trapezoid(4, 3.0), trapezoid(1, 1.7))


def quadrature(site: Site) -> StandIn:
    """Take Gaussian inputs, independent of each other: the operator at the points of a grid."""
    n = len(site.inputs)
    nodes = _NODES[min(n, len(_NODES)) - 1]

    def response(means: list[Any], variances: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Mean, variance and gains of the output."""
        center = site.run(means)[0]
        finite = center.isfinite()

        def inside(*x: Tensor) -> Tensor:
            """Count points outside the function's domain as its center; that may lie outside itself."""
            value = site.run(site.at(means, x))[0]
            return torch.where(finite, torch.where(value.isfinite(), value, center), 0.0)

        given = [x.expand_as(center) for x in site.random(means)]
        mean, variance, *gains = _expected(inside, given, [v.expand_as(center) for v in variances], nodes)
        return torch.where(finite, mean, center), variance, gains

    def propagate(*args: Any, **kwargs: Any) -> Propagated:
        values = site.values(args, kwargs)
        variances = site.variances(values)
        mean, variance, gains = response([mean_of(v) for v in values], variances)
        inputs = site.random(values)

        def linearize() -> Linearization:
            explained: Any = sum(g * g * v for g, v in zip(gains, variances, strict=True))
            left = (variance - explained).clamp_min(0)
            if [x.shape for x in inputs] == [mean.shape] and is_moments(inputs[0]):
                return scaled(gains[0], left)
            return mapped(pull, left)

        def pull(cotangent: Tensor) -> list[Any]:
            each = [gathered(cotangent * g, x.shape) for g, x in zip(gains, inputs, strict=True)]
            return site.in_order(values, each)

        return Propagated(site.packed([Moments(mean, variance)]), linearize)

    count = (2 * len(nodes) + 1) ** n
    return StandIn(propagate, f"approximate: quadrature with {count} points, if Gaussian")


def _expected(
    f: Callable[..., Tensor], means: list[Tensor], variances: list[Tensor], nodes: Nodes
) -> list[Tensor]:
    """Mean, variance and gains, by the laws of total expectation and total variance."""
    if len(means) == 1:
        return list(expectation(f, means[0], variances[0], nodes))

    def rest(x: Tensor) -> Tensor:
        """Return mean, variance and gains over the other inputs, given the first."""
        return torch.stack(_expected(lambda *y: f(x, *y), means[1:], variances[1:], nodes))

    (mean, within, *gains), (between, *_), (gain, *_) = expectation(rest, means[0], variances[0], nodes)
    return [mean, between + within, gain, *gains]
