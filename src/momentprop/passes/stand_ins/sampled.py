"""Stands in for operators by a small sample: their results at fixed points of Gaussian inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.normal import safe_sqrt
from momentprop.passes.stand_ins.general import General
from momentprop.passes.stand_ins.probes import points, sampled
from momentprop.passes.stand_ins.site import Site

_PAIRS = 32  # points of a sample, with as many mirror images
_JACOBIANS = 8  # pairs of points over which a Jacobian is averaged


class Sampled(General):
    exactness = f"estimated from {2 * _PAIRS} points"

    def __init__(self, site: Site, accurate: bool) -> None:
        super().__init__(site, accurate)
        self.table = points(_PAIRS, self.columns)
        self.few = points(_JACOBIANS, self.columns)

    def response(
        self, means: list[Any], variances: list[Tensor]
    ) -> tuple[list[Any], list[Tensor], list[Tensor | None]]:
        sample = Sample(self.site, means)
        point = sampled([safe_sqrt(v) for v in variances], self.columns, self.table)
        odd: list[Any] = [0.0] * sum(self.site.results)
        for k in range(_PAIRS):
            deviations = point(k)
            there = sample.add(deviations)
            back = sample.add([-d for d in deviations])
            halves = [(a - b) / 2 for (a, _), (b, _) in zip(there, back, strict=True)]
            odd = [o + h * h / _PAIRS for o, h in zip(odd, halves, strict=True)]
        results, spread = sample.moments()
        return results, spread, [(v - part).clamp_min(0) for v, part in zip(spread, odd, strict=True)]

    def pulled(self, cotangents: list[Tensor], means: list[Any], variances: list[Tensor]) -> list[Tensor]:
        """The transposed Jacobian, on average over a few points."""
        assert self.transposed is not None
        few = sampled([safe_sqrt(v) for v in variances], self.columns, self.few)
        total: list[Any] = [0.0] * len(variances)
        count: list[Any] = [0.0] * len(variances)
        for k in range(_JACOBIANS):
            for sign in (1.0, -1.0):
                point = self.site.shifted(means, [sign * d for d in few(k)])
                found = list(self.transposed(*cotangents, *point))
                inside = [torch.isfinite(f) for f in found]
                total = [t + torch.where(i, f, 0.0) for t, f, i in zip(total, found, inside, strict=True)]
                count = [c + i.to(f.dtype) for c, f, i in zip(count, found, inside, strict=True)]
        return [t / c.clamp_min(1) for t, c in zip(total, count, strict=True)]


class Sample:
    """Mean and variance of an operator's results over points, as deviations from its results at the mean."""

    def __init__(self, site: Site, means: list[Any]) -> None:
        self.site, self.means = site, means
        self.results = site.run(means)
        n = sum(site.results)
        self.count: list[Any] = [0.0] * n
        self.sum: list[Any] = [0.0] * n
        self.squares: list[Any] = [0.0] * n

    def add(self, deviations: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Add a point; return how far results move, and whether it lies in the operator's domain."""
        found = self.site.real(self.site.run(self.site.shifted(self.means, deviations)))
        told = []
        for i, (there, here) in enumerate(zip(found, self.site.real(self.results), strict=True)):
            inside = torch.isfinite(there)
            moved = torch.where(inside, there - here, 0.0)
            self.count[i] = self.count[i] + inside.to(here.dtype)
            self.sum[i] = self.sum[i] + moved
            self.squares[i] = self.squares[i] + moved * moved
            told.append((moved, inside.to(here.dtype)))
        return told

    def moments(self) -> tuple[list[Any], list[Tensor]]:
        results, variances = list(self.results), []
        j = 0
        for i, real in enumerate(self.site.results):
            if real:
                count = self.count[j].clamp_min(1)
                shift = self.sum[j] / count
                results[i] = results[i] + shift
                variances.append((self.squares[j] / count - shift * shift).clamp_min(0))
                j += 1
        return results, variances
