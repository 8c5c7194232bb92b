"""Stands in for any operator: to first order by its Jacobian at the mean, or by a small sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.normal import safe_sqrt
from momentprop.moments import Moments, mean_of
from momentprop.passes.stand_ins.probes import Columns, grouped, groups, points, sampled
from momentprop.passes.stand_ins.site import Propagate, Site, StandIn
from momentprop.rules.facts import Unexplained, knowing
from momentprop.rules.linearization import Propagated, mapped

_PAIRS = 32  # points of a sample, with as many mirror images
_JACOBIANS = 8  # pairs of points over which a Jacobian is averaged

# (means, variances) -> all results, and of the real ones the variances, and what the Jacobian leaves of them
Response = Callable[[list[Any], list[Tensor]], tuple[list[Any], list[Tensor], list[Tensor | None]]]
# (cotangents of the real results, means, variances) -> those of the random inputs
Transposed = Callable[[list[Tensor], list[Any], list[Tensor]], Sequence[Tensor]]


def first_order(site: Site, accurate: bool) -> StandIn:
    """Multiply deviations with the Jacobian at the mean."""
    columns, push = Columns.of(site.shapes), site.push()
    transposed = site.pull() if accurate else None

    def pushed(deviations: list[Tensor], means: list[Any]) -> list[Tensor]:
        if push is not None:
            return list(push(*deviations, *means))
        # PyTorch has no such derivative: the slope over the deviation to both sides
        there, back = (
            site.real(site.run(site.shifted(means, [sign * d for d in deviations]))) for sign in (1.0, -1.0)
        )
        return [(a - b) / 2 for a, b in zip(there, back, strict=True)]

    def response(
        means: list[Any], variances: list[Tensor]
    ) -> tuple[list[Any], list[Tensor], list[Tensor | None]]:
        total: list[Any] = [0.0] * sum(site.results)
        deviations = grouped([safe_sqrt(v) for v in variances], columns)
        for i in range(groups(columns)):
            total = [t + p * p for t, p in zip(total, pushed(deviations(i), means), strict=True)]
        return site.run(means), total, [None] * len(total)

    def pulled(cotangents: list[Tensor], means: list[Any], variances: list[Tensor]) -> Sequence[Tensor]:
        assert transposed is not None
        return transposed(*cotangents, *means)

    n = groups(columns)
    estimated = "" if n == sum(c.count for c in columns) else f", variance from {n} deviations"
    slopes = "" if push is not None else ", by slopes over one std"
    return StandIn(_answer(site, response, pulled), f"first order{estimated}{slopes}")


def sample(site: Site, accurate: bool) -> StandIn:
    """Take the results at fixed points of Gaussian inputs, and the Jacobian on average over a few of them."""
    columns = Columns.of(site.shapes)
    table, few = points(_PAIRS, columns), points(_JACOBIANS, columns)
    transposed = site.pull() if accurate else None

    def response(
        means: list[Any], variances: list[Tensor]
    ) -> tuple[list[Any], list[Tensor], list[Tensor | None]]:
        results = site.run(means)
        centers = site.real(results)
        point = sampled([safe_sqrt(v) for v in variances], columns, table)

        def moved(deviations: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
            """How far each result moves, and whether the point lies in the operator's domain."""
            found = site.real(site.run(site.shifted(means, deviations)))
            inside = [torch.isfinite(there) for there in found]
            moves = [torch.where(i, f - c, 0.0) for i, f, c in zip(inside, found, centers, strict=True)]
            return [(m, i.to(m.dtype)) for m, i in zip(moves, inside, strict=True)]

        totals: list[list[Any]] = [[0.0] * 4 for _ in centers]
        for k in range(_PAIRS):
            deviations = point(k)
            there, back = moved(deviations), moved([-d for d in deviations])
            for total, (a, a_inside), (b, b_inside) in zip(totals, there, back, strict=True):
                odd = (a - b) / 2
                parts = a_inside + b_inside, a + b, a * a + b * b, odd * odd
                total[:] = [t + part for t, part in zip(total, parts, strict=True)]
        spread: list[Tensor] = []
        left: list[Tensor | None] = []
        for i, (count, moves, squares, odds) in zip(site.real(range(len(results))), totals, strict=True):
            shift = moves / count.clamp_min(1)
            results[i] = results[i] + shift
            spread.append((squares / count.clamp_min(1) - shift * shift).clamp_min(0))
            left.append((spread[-1] - odds / _PAIRS).clamp_min(0))
        return results, spread, left

    def pulled(cotangents: list[Tensor], means: list[Any], variances: list[Tensor]) -> Sequence[Tensor]:
        assert transposed is not None
        point = sampled([safe_sqrt(v) for v in variances], columns, few)
        total: list[Any] = [0.0] * len(variances)
        count: list[Any] = [0.0] * len(variances)
        for k in range(_JACOBIANS):
            for sign in (1.0, -1.0):
                found = transposed(*cotangents, *site.shifted(means, [sign * d for d in point(k)]))
                for i, f in enumerate(found):
                    inside = torch.isfinite(f)
                    total[i] = total[i] + torch.where(inside, f, 0.0)
                    count[i] = count[i] + inside.to(f.dtype)
        return [t / c.clamp_min(1) for t, c in zip(total, count, strict=True)]

    return StandIn(_answer(site, response, pulled), f"estimated from {2 * _PAIRS} points")


def _answer(site: Site, response: Response, pulled: Transposed) -> Propagate:
    def propagate(*args: Any, **kwargs: Any) -> Propagated:
        values = site.values(args, kwargs)
        means, variances = [mean_of(v) for v in values], site.variances(values)
        results, spread, left = response(means, variances)
        zeros = [torch.zeros_like(r) for r in site.real(results)]

        def pull(cotangent: Any) -> list[Any]:
            given = site.real(site.as_list(cotangent))
            rows = []
            for k in range(max([0 if c is None else c.shape[0] for c in given])):
                row = [z if c is None else c[k] for z, c in zip(zeros, given, strict=True)]
                rows.append(pulled(row, means, variances))
            return site.in_order(values, [torch.stack(r) for r in zip(*rows, strict=True)])

        if not site.is_list:
            return Propagated(Moments(results[0], spread[0]), lambda: mapped(pull, left[0]))
        # of several results, each brings its noise to where it is taken
        for i, variance, noise in zip(site.real(range(len(results))), spread, left, strict=True):
            results[i] = knowing(Moments(results[i], variance), None if noise is None else Unexplained(noise))
        return Propagated(site.packed(results), lambda: mapped(pull))

    return propagate
