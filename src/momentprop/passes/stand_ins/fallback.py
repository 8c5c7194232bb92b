"""A rule for one node of the graph, whose operator has none: what the kinds of it have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.passes.stand_ins.probes import Columns
from momentprop.passes.stand_ins.site import Program, Site
from momentprop.rules.families import gathered
from momentprop.rules.local import Elementwise, Linear, Local


class AtMean:
    """The operator at the means: results are known."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self.site.run([mean_of(v) for v in self.site.values(args, kwargs)])
        return results if self.site.is_list else results[0]


class Responding(Moments):
    """Moments with what the rule found out about deviations on the way."""

    gains: list[Tensor]  # of an operator that works element by element, by its inputs
    noise: Tensor | None  # what the Jacobian of any other does not explain


class Fallback:
    """A rule for one node of the graph."""

    exactness = ""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __deepcopy__(self, memo: dict[int, Any]) -> Fallback:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = self.site.values(args, kwargs)
        means = [mean_of(v) for v in values]
        inputs = [values[places[0]] for places in self.site.inputs]
        out = self.moments(means, [variance_of(x) for x in inputs])
        return out if self.site.is_list else out[0]

    def moments(self, means: list[Any], variances: list[Tensor]) -> list[Any]:
        """All results of the operator: Moments, where they are real numbers."""
        raise NotImplementedError

    def packed(self, results: list[Any], variances: list[Tensor]) -> list[Any]:
        rest = list(variances)
        return [
            Responding(value, rest.pop(0)) if real else value
            for value, real in zip(results, self.site.results, strict=True)
        ]

    def local(self, out: Any, *args: Any, **kwargs: Any) -> Local:
        raise NotImplementedError

    def in_order(self, values: list[Any], pulled: Sequence[Any]) -> list[Any]:
        """What belongs to an input stands where it is first used; only random ones are asked for."""
        first = {places[0]: c for places, c in zip(self.site.inputs, pulled, strict=True)}
        return [first.get(i) for i, v in enumerate(values) if is_moments(v)]


class Pointwise(Fallback):
    """An operator that works element by element."""

    def local(self, out: Any, *args: Any, **kwargs: Any) -> Local:
        values = self.site.values(args, kwargs)
        inputs = [values[places[0]] for places in self.site.inputs]
        gains = out.gains
        explained: Any = 0.0
        for gain, x in zip(gains, inputs, strict=True):
            explained = explained + gain * gain * variance_of(x)
        noise = self.noise(out.variance, explained)
        if [x.shape for x in inputs if is_moments(x)] == [out.shape] and len(gains) == 1:
            return Elementwise(gains[0], noise)

        def pull(cotangent: Tensor) -> list[Any]:
            each = [gathered(cotangent * g, x.shape) for g, x in zip(gains, inputs, strict=True)]
            return self.in_order(values, each)

        return Linear(pull, noise)

    def noise(self, variance: Tensor, explained: Tensor) -> Tensor | None:
        return (variance - explained).clamp_min(0)


class General(Fallback):
    """Any operator, by its Jacobian."""

    def __init__(self, site: Site, accurate: bool) -> None:
        super().__init__(site)
        self.columns = Columns.of(site.shapes)
        self.transposed: Program | None = site.pull() if accurate else None

    def local(self, out: Any, *args: Any, **kwargs: Any) -> Linear:
        values = self.site.values(args, kwargs)
        means = [mean_of(v) for v in values]
        variances = [variance_of(values[places[0]]) for places in self.site.inputs]
        results = self.site.real(list(out) if self.site.is_list else [out])

        def pull(cotangent: Any) -> list[Any]:
            given = self.site.real(cotangent if self.site.is_list else [cotangent])
            count = max([0 if c is None else c.shape[0] for c in given])
            zeros = [torch.zeros_like(r.mean) for r in results]
            rows = []
            for k in range(count):
                row = [z if c is None else c[k] for z, c in zip(zeros, given, strict=True)]
                rows.append(self.pulled(row, means, variances))
            return self.in_order(values, [torch.stack(r) for r in zip(*rows, strict=True)])

        # of several results, each brings its noise to where it is used: adjoint.py
        return Linear(pull, None if self.site.is_list else out.noise)

    def pulled(self, cotangents: list[Tensor], means: list[Any], variances: list[Tensor]) -> list[Tensor]:
        """The transposed Jacobian at the mean, for one cotangent of every real result."""
        assert self.transposed is not None
        return list(self.transposed(*cotangents, *means))
