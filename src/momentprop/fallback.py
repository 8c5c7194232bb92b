"""Operators without a rule, where the user asked for it: first order, or a small sample.

`unsupported="linearize"`: mean f(E), variance diag(J diag(V) J^T) with J the Jacobian at E, and J again for
the deviations. J comes from PyTorch's own derivatives, traced at conversion (site.py). Where f works element
by element, J is a diagonal. Elsewhere the variance is a sum of squares (J d)^2 over deviations d: one for
each element of a sample if it has up to 64, which is exact; otherwise one for each of 61 groups of
elements, with a fixed sign for every element, which estimates it without bias. Where PyTorch has no
derivative to multiply deviations with, J d is half the difference of f at E + d and E - d.

`unsupported="sample"`: f at 32 fixed points and their mirror images, N(E, V) element by element; mean and
variance are those of the results. Points outside the domain of f, where it is not finite, are left out. For
the deviations, Stein's E[f'] (local.py): where f works element by element, by regression of f on its input;
elsewhere J on average over 16 points, and noise for what changes f alike in a point and its mirror image.

Measured against large samples: element by element, mean to 0.02 std and std to 6 % (sinc over one std);
elsewhere mean to 0.1 std, std to 15 %, in tier `accurate` 25 % (sort, the worst of those tried;
log-cumsum-exp 2 %).

Results that are no real numbers (indices, comparisons) are taken at the mean and count as known.

Both know of nothing but the variances of the inputs, and take elements as uncorrelated, as rules do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from momentprop.coverage import FALLBACK, RULE, creates_noise
from momentprop.errors import MissingRuleError
from momentprop.gaussian import safe_sqrt
from momentprop.local import Elementwise, Linear, Local
from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.probes import Columns, grouped, groups, points, sampled
from momentprop.registry import Rule
from momentprop.rules.families import gathered
from momentprop.site import Program, Site
from momentprop.trace import place_of

UNSUPPORTED = ("error", "linearize", "sample")
_PAIRS = 32  # points of a sample, with as many mirror images
_JACOBIANS = 8  # pairs of points over which a Jacobian is averaged
_FROM_POINTS = f"estimated from {2 * _PAIRS} points"
_SHAPED_BY_DATA = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def mark(nodes: Sequence[fx.Node], unsupported: str) -> None:
    """Say of these nodes, which have no rule, what to do about it; of some, nothing can be done."""
    for node in nodes:
        op = node.target
        if not isinstance(op, OpOverload) or creates_noise(node):
            continue
        if not any(tag in op.tags for tag in _SHAPED_BY_DATA):
            node.meta[FALLBACK] = unsupported


def attach(graph: fx.Graph, random: set[fx.Node], accurate: bool) -> None:
    """Give a rule of its own to every marked node that noise reaches."""
    failed = []
    for node in graph.nodes:
        if FALLBACK not in node.meta or random.isdisjoint(node.all_input_nodes):
            continue
        try:
            node.meta[RULE] = _rule(node, random, accurate)
        except Exception as error:  # whatever PyTorch says about a derivative
            first = (str(error).splitlines() or [type(error).__name__])[0]
            failed.append(place_of(node, f"unsupported={node.meta[FALLBACK]!r} does not help: {first}"))
    if failed:
        raise MissingRuleError(failed)


def _rule(node: fx.Node, random: set[fx.Node], accurate: bool) -> Rule:
    method = node.meta[FALLBACK]
    site = Site.of(node, random)
    reference = f"unsupported={method!r}"
    if not any(site.results) or not site.inputs:
        at_mean = AtMean(site)
        return Rule(site.op, at_mean, "taken at the mean", reference, ignores_values=True)
    pointwise = torch.Tag.pointwise in site.op.tags and not site.is_list
    made: Fallback
    if method == "sample":
        made = SampledPointwise(site) if pointwise else Sampled(site, accurate)
    else:
        made = LinearizedPointwise(site) if pointwise else Linearized(site, accurate)
    return Rule(site.op, made, made.exactness, reference, local=made.local)


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


class LinearizedPointwise(Pointwise):
    exactness = "first order"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.gains = site.gains()

    def moments(self, means: list[Any], variances: list[Tensor]) -> list[Any]:
        # a derivative may be infinite where nothing is random
        pairs = zip(self.gains(*means), variances, strict=True)
        gains = [torch.where(v > 0, g, 0.0) for g, v in pairs]
        total: Any = 0.0
        for gain, variance in zip(gains, variances, strict=True):
            total = total + gain * gain * variance
        (out,) = self.packed(self.site.run(means), [total])
        out.gains = gains
        return [out]

    def noise(self, variance: Tensor, explained: Tensor) -> Tensor | None:
        return None


class SampledPointwise(Pointwise):
    exactness = _FROM_POINTS

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        # one column for all elements of an input: they do not meet
        self.columns = [Columns(i, (1,) * len(shape)) for i, shape in enumerate(site.shapes)]
        self.table = points(_PAIRS, self.columns)
        # regression on all inputs together: their points are not quite uncorrelated
        self.solve = torch.linalg.inv(self.table.T @ self.table / _PAIRS).tolist()

    def moments(self, means: list[Any], variances: list[Tensor]) -> list[Any]:
        stds = [safe_sqrt(v) for v in variances]
        units = sampled([torch.ones_like(v) for v in variances], self.columns, self.table)
        sample = Sample(self.site, means)
        along: list[Any] = [0.0 for _ in stds]
        count: Any = 0.0
        for k in range(_PAIRS):
            unit = units(k)
            for sign in (1.0, -1.0):
                deviations = [sign * std * u for std, u in zip(stds, unit, strict=True)]
                ((moved, inside),) = sample.add(deviations)
                along = [a + sign * u * moved for a, u in zip(along, unit, strict=True)]
                count = count + inside
        (out,) = self.packed(*sample.moments())
        out.gains = []
        for row, std in zip(self.solve, stds, strict=True):
            slope: Any = 0.0
            for weight, a in zip(row, along, strict=True):
                slope = slope + weight * a
            out.gains.append(slope / (count.clamp_min(1) * std))
        return [out]


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

    def moments(self, means: list[Any], variances: list[Tensor]) -> list[Any]:
        total: list[Any] = [0.0] * sum(self.site.results)
        deviations = grouped([safe_sqrt(v) for v in variances], self.columns)
        for i in range(groups(self.columns)):
            pushed = self.pushed(deviations(i), means)
            total = [t + p * p for t, p in zip(total, pushed, strict=True)]
        out = self.packed(self.site.run(means), total)
        for result in self.site.real(out):
            result.noise = None
        return out

    def pushed(self, deviations: list[Tensor], means: list[Any]) -> list[Tensor]:
        """J times deviations of the inputs."""
        if self.push is not None:
            return list(self.push(*deviations, *means))
        # PyTorch has no such derivative: the slope over the deviation to both sides
        there = self.site.real(self.site.run(self.site.shifted(means, deviations)))
        back = self.site.real(self.site.run(self.site.shifted(means, [-d for d in deviations])))
        return [(a - b) / 2 for a, b in zip(there, back, strict=True)]


class Sampled(General):
    exactness = _FROM_POINTS

    def __init__(self, site: Site, accurate: bool) -> None:
        super().__init__(site, accurate)
        self.table = points(_PAIRS, self.columns)
        self.few = points(_JACOBIANS, self.columns)

    def moments(self, means: list[Any], variances: list[Tensor]) -> list[Any]:
        sample = Sample(self.site, means)
        point = sampled([safe_sqrt(v) for v in variances], self.columns, self.table)
        odd: list[Any] = [0.0] * sum(self.site.results)
        for k in range(_PAIRS):
            deviations = point(k)
            there = sample.add(deviations)
            back = sample.add([-d for d in deviations])
            halves = [(a - b) / 2 for (a, _), (b, _) in zip(there, back, strict=True)]
            odd = [o + h * h / _PAIRS for o, h in zip(odd, halves, strict=True)]
        out = self.packed(*sample.moments())
        for result, part in zip(self.site.real(out), odd, strict=True):
            result.noise = (result.variance - part).clamp_min(0)
        return out

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
        """How far the results move, and whether the point lies in the operator's domain."""
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
