"""The stand-in of any operator: to first order, by its Jacobian at the mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.normal import safe_sqrt
from momentprop.moments import Moments
from momentprop.passes.stand_ins.probes import Columns, grouped, groups
from momentprop.passes.stand_ins.site import Program, Site
from momentprop.passes.stand_ins.stand_in import StandIn
from momentprop.rules.facts import Unexplained, knowing
from momentprop.rules.linearization import Propagated, mapped


class General(StandIn):
    """Stands in for any operator. The linear part is its Jacobian."""

    def __init__(self, site: Site, accurate: bool) -> None:
        super().__init__(site)
        self.columns = Columns.of(site.shapes)
        self.transposed: Program | None = site.pull() if accurate else None

    def response(
        self, means: list[Any], variances: list[Tensor]
    ) -> tuple[list[Any], list[Tensor], list[Tensor | None]]:
        """All results; of those that are real numbers the variances, and what the Jacobian leaves of them."""
        raise NotImplementedError

    def answer(self, values: list[Any], means: list[Any]) -> Propagated:
        variances = self.variances(values)
        results, spread, left = self.response(means, variances)
        zeros = [torch.zeros_like(r) for r in self.site.real(results)]

        def pull(cotangent: Any) -> list[Any]:
            given = self.site.real(self.site.as_list(cotangent))
            rows = []
            for k in range(max([0 if c is None else c.shape[0] for c in given])):
                row = [z if c is None else c[k] for z, c in zip(zeros, given, strict=True)]
                rows.append(self.pulled(row, means, variances))
            return self.in_order(values, [torch.stack(r) for r in zip(*rows, strict=True)])

        if not self.site.is_list:
            return Propagated(Moments(results[0], spread[0]), lambda: mapped(pull, left[0]))
        # of several results, each brings its noise to where it is taken
        parts = iter(zip(spread, left, strict=True))
        found = [
            _with_noise(r, *next(parts)) if real else r
            for r, real in zip(results, self.site.results, strict=True)
        ]
        return Propagated(self.site.packed(found), lambda: mapped(pull))

    def pulled(self, cotangents: list[Tensor], means: list[Any], variances: list[Tensor]) -> list[Tensor]:
        """The transposed Jacobian at the mean, for one cotangent of every real result."""
        assert self.transposed is not None
        return list(self.transposed(*cotangents, *means))


class Linearized(General):
    """Works to first order: deviations are multiplied with the Jacobian at the mean."""

    def __init__(self, site: Site, accurate: bool) -> None:
        super().__init__(site, accurate)
        self.push = site.push()
        n = groups(self.columns)
        estimated = "" if n == sum(c.count for c in self.columns) else f", variance from {n} deviations"
        slopes = "" if self.push is not None else ", by slopes over one std"
        self.exactness = f"first order{estimated}{slopes}"

    def response(
        self, means: list[Any], variances: list[Tensor]
    ) -> tuple[list[Any], list[Tensor], list[Tensor | None]]:
        total: list[Any] = [0.0] * sum(self.site.results)
        deviations = grouped([safe_sqrt(v) for v in variances], self.columns)
        for i in range(groups(self.columns)):
            total = [t + p * p for t, p in zip(total, self.pushed(deviations(i), means), strict=True)]
        return self.site.run(means), total, [None] * len(total)

    def pushed(self, deviations: list[Tensor], means: list[Any]) -> list[Tensor]:
        """The Jacobian times deviations of the inputs."""
        if self.push is not None:
            return list(self.push(*deviations, *means))
        # PyTorch has no such derivative: the slope over the deviation to both sides
        there, back = (
            self.site.real(self.site.run(self.site.shifted(means, [sign * d for d in deviations])))
            for sign in (1.0, -1.0)
        )
        return [(a - b) / 2 for a, b in zip(there, back, strict=True)]


def _with_noise(mean: Tensor, variance: Tensor, noise: Tensor | None) -> Moments:
    return knowing(Moments(mean, variance), None if noise is None else Unexplained(noise))
