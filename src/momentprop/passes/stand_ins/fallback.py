"""A rule for one node of the graph, whose operator has none: what the kinds of it have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.passes.stand_ins.probes import Columns
from momentprop.passes.stand_ins.site import Program, Site
from momentprop.rules.facts import Unexplained, knowing
from momentprop.rules.linearization import Linearization, Propagated, gathered, mapped, scaled


class AtMean:
    """The operator at the means: results are known."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self.site.run([mean_of(v) for v in self.site.values(args, kwargs)])
        return results if self.site.is_list else results[0]


class Fallback:
    """A rule for one node of the graph."""

    exactness = ""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __deepcopy__(self, memo: dict[int, Any]) -> Fallback:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Propagated:
        values = self.site.values(args, kwargs)
        means = [mean_of(v) for v in values]
        inputs = [values[places[0]] for places in self.site.inputs]
        return self.answer(values, means, inputs)

    def answer(self, values: list[Any], means: list[Any], inputs: list[Any]) -> Propagated:
        """Moments of the results, and the linear part, for the values given and their means."""
        raise NotImplementedError

    def packed(self, results: list[Any], variances: list[Tensor]) -> list[Any]:
        """All results of the operator: Moments, where they are real numbers."""
        rest = list(variances)
        return [
            Moments(value, rest.pop(0)) if real else value
            for value, real in zip(results, self.site.results, strict=True)
        ]

    def in_order(self, values: list[Any], pulled: Sequence[Any]) -> list[Any]:
        """What belongs to an input stands where it is first used; only random ones are asked for."""
        first = {places[0]: c for places, c in zip(self.site.inputs, pulled, strict=True)}
        return [first.get(i) for i, v in enumerate(values) if is_moments(v)]


class Pointwise(Fallback):
    """An operator that works element by element."""

    def moments(self, means: list[Any], variances: list[Tensor]) -> tuple[Moments, list[Tensor]]:
        """Moments of the result, and the gain of every input."""
        raise NotImplementedError

    def answer(self, values: list[Any], means: list[Any], inputs: list[Any]) -> Propagated:
        out, gains = self.moments(means, [variance_of(x) for x in inputs])

        def linearize() -> Linearization:
            explained: Any = 0.0
            for gain, x in zip(gains, inputs, strict=True):
                explained = explained + gain * gain * variance_of(x)
            noise = self.noise(out.variance, explained)
            if [x.shape for x in inputs if is_moments(x)] == [out.shape] and len(gains) == 1:
                return scaled(gains[0], noise)
            return mapped(pull, noise)

        def pull(cotangent: Tensor) -> list[Any]:
            each = [gathered(cotangent * g, x.shape) for g, x in zip(gains, inputs, strict=True)]
            return self.in_order(values, each)

        return Propagated([out] if self.site.is_list else out, linearize)

    def noise(self, variance: Tensor, explained: Tensor) -> Tensor | None:
        return (variance - explained).clamp_min(0)


class General(Fallback):
    """Any operator, by its Jacobian."""

    def __init__(self, site: Site, accurate: bool) -> None:
        super().__init__(site)
        self.columns = Columns.of(site.shapes)
        self.transposed: Program | None = site.pull() if accurate else None

    def moments(self, means: list[Any], variances: list[Tensor]) -> tuple[list[Any], list[Tensor | None]]:
        """All results of the operator, and of those that are real the noise that the Jacobian leaves."""
        raise NotImplementedError

    def answer(self, values: list[Any], means: list[Any], inputs: list[Any]) -> Propagated:
        variances = [variance_of(x) for x in inputs]
        out, noises = self.moments(means, variances)
        results = self.site.real(out)

        def pull(cotangent: Any) -> list[Any]:
            given = self.site.real(cotangent if self.site.is_list else [cotangent])
            count = max([0 if c is None else c.shape[0] for c in given])
            zeros = [torch.zeros_like(r.mean) for r in results]
            rows = []
            for k in range(count):
                row = [z if c is None else c[k] for z, c in zip(zeros, given, strict=True)]
                rows.append(self.pulled(row, means, variances))
            return self.in_order(values, [torch.stack(r) for r in zip(*rows, strict=True)])

        if not self.site.is_list:
            return Propagated(out[0], lambda: mapped(pull, noises[0]))
        # of several results, each brings its noise to where it is taken
        rest = list(noises)
        each = [
            knowing(r, None if (noise := rest.pop(0)) is None else Unexplained(noise)) if is_moments(r) else r
            for r in out
        ]
        return Propagated(each, lambda: mapped(pull))

    def pulled(self, cotangents: list[Tensor], means: list[Any], variances: list[Tensor]) -> list[Tensor]:
        """The transposed Jacobian at the mean, for one cotangent of every real result."""
        assert self.transposed is not None
        return list(self.transposed(*cotangents, *means))
