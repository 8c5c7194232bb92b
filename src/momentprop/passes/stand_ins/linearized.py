"""Operators to first order: by their Jacobian at the mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.normal import safe_sqrt
from momentprop.moments import Moments
from momentprop.passes.stand_ins.fallback import General, Pointwise
from momentprop.passes.stand_ins.probes import grouped, groups
from momentprop.passes.stand_ins.site import Site


class LinearizedPointwise(Pointwise):
    exactness = "first order"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.gains = site.gains()

    def moments(self, means: list[Any], variances: list[Tensor]) -> tuple[Moments, list[Tensor]]:
        # a derivative may be infinite where nothing is random
        pairs = zip(self.gains(*means), variances, strict=True)
        gains = [torch.where(v > 0, g, 0.0) for g, v in pairs]
        total: Any = 0.0
        for gain, variance in zip(gains, variances, strict=True):
            total = total + gain * gain * variance
        (out,) = self.packed(self.site.run(means), [total])
        return out, gains

    def noise(self, variance: Tensor, explained: Tensor) -> Tensor | None:
        return None


class Linearized(General):
    def __init__(self, site: Site, accurate: bool) -> None:
        super().__init__(site, accurate)
        self.push = site.push()

    @property
    def exactness(self) -> str:  # type: ignore[override]
        n = groups(self.columns)
        exact = n == sum([c.count for c in self.columns])
        estimated = "" if exact else f", variance from {n} deviations"
        return f"first order{estimated}{', by slopes over one std' * (self.push is None)}"

    def moments(self, means: list[Any], variances: list[Tensor]) -> tuple[list[Any], list[Tensor | None]]:
        total: list[Any] = [0.0] * sum(self.site.results)
        deviations = grouped([safe_sqrt(v) for v in variances], self.columns)
        for i in range(groups(self.columns)):
            pushed = self.pushed(deviations(i), means)
            total = [t + p * p for t, p in zip(total, pushed, strict=True)]
        return self.packed(self.site.run(means), total), [None] * sum(self.site.results)

    def pushed(self, deviations: list[Tensor], means: list[Any]) -> list[Tensor]:
        """J times deviations of the inputs."""
        if self.push is not None:
            return list(self.push(*deviations, *means))
        # PyTorch has no such derivative: the slope over the deviation to both sides
        there = self.site.real(self.site.run(self.site.shifted(means, deviations)))
        back = self.site.real(self.site.run(self.site.shifted(means, [-d for d in deviations])))
        return [(a - b) / 2 for a, b in zip(there, back, strict=True)]
