"""The stand-in of any operator: to first order, by its Jacobian at the mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.normal import safe_sqrt
from momentprop.moments import mean_of
from momentprop.passes.stand_ins.probes import Columns, grouped, groups
from momentprop.passes.stand_ins.site import Program, Site
from momentprop.passes.stand_ins.stand_in import StandIn
from momentprop.rules.local import Linear


class General(StandIn):
    """Any operator. Its linear part is its Jacobian."""

    def __init__(self, site: Site, accurate: bool) -> None:
        super().__init__(site)
        self.columns = Columns.of(site.shapes)
        self.transposed: Program | None = site.pull() if accurate else None

    def local(self, out: Any, *args: Any, **kwargs: Any) -> Linear:
        values = self.site.values(args, kwargs)
        means, variances = [mean_of(v) for v in values], self.variances(values)
        zeros = [torch.zeros_like(r.mean) for r in self.site.real(self.site.as_list(out))]

        def pull(cotangent: Any) -> list[Any]:
            given = self.site.real(self.site.as_list(cotangent))
            rows = []
            for k in range(max([0 if c is None else c.shape[0] for c in given])):
                row = [z if c is None else c[k] for z, c in zip(zeros, given, strict=True)]
                rows.append(self.pulled(row, means, variances))
            return self.in_order(values, [torch.stack(r) for r in zip(*rows, strict=True)])

        return Linear(pull, self.noise(out))

    def noise(self, out: Any) -> Tensor | None:
        """What of the variance the Jacobian does not explain."""
        return None

    def pulled(self, cotangents: list[Tensor], means: list[Any], variances: list[Tensor]) -> list[Tensor]:
        """The transposed Jacobian at the mean, for one cotangent of every real result."""
        assert self.transposed is not None
        return list(self.transposed(*cotangents, *means))


class Linearized(General):
    """First order: deviations are multiplied with the Jacobian at the mean."""

    def __init__(self, site: Site, accurate: bool) -> None:
        super().__init__(site, accurate)
        self.push = site.push()
        n = groups(self.columns)
        estimated = "" if n == sum(c.count for c in self.columns) else f", variance from {n} deviations"
        slopes = "" if self.push is not None else ", by slopes over one std"
        self.exactness = f"first order{estimated}{slopes}"

    def moments(self, means: list[Any], variances: list[Tensor]) -> list[Any]:
        total: list[Any] = [0.0] * sum(self.site.results)
        deviations = grouped([safe_sqrt(v) for v in variances], self.columns)
        for i in range(groups(self.columns)):
            total = [t + p * p for t, p in zip(total, self.pushed(deviations(i), means), strict=True)]
        return self.with_variances(self.site.run(means), total)

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
