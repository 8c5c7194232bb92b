"""Max pooling of dropped values: the maximum is taken case by case, over what was kept.

Behind dropout a value is a spike at zero or x / (1-p), which no Gaussian resembles, least of all where
several compete for a maximum: of four equal values, each dropped with p = 0.3, the maximum is that value
99 % of the time, while that of four Gaussians of the same moments is well above and varies. So the windows'
2^n cases are gone through, each the maximum of the values kept, and of zero where one is dropped; and
the moments are those of the mixture.

Masks are no one else's inside a window that shares no element with another, so what they add is
noise of the output; to the values x the maximum responds by the expected derivative, as everywhere.

Measured on the paper's network with dropout before pooling (two_conv_blocks_bn), std over MC std, median
(5..95 %), and the MC samples that the predictive distribution is worth: pooling of Gaussians 0.984
(0.89..1.05), 90; pooling case by case 0.996 (0.93..1.04), 118.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.engine.fused import Fused, is_lone_dropout
from momentprop.gaussian.normal import positive_probability, relu_moments
from momentprop.graph.ops import MAX_POOLS
from momentprop.graph.schema import bind
from momentprop.moments import Moments, is_moments
from momentprop.rules.linearization import Propagated, source
from momentprop.rules.max_pooling import Elements, Maximum, pooled
from momentprop.rules.registry import Role
from momentprop.rules.windows import Position, Windows

aten = torch.ops.aten

_LARGEST = 4  # elements of a window


def dropped_pools(graph: fx.Graph, random: Collection[fx.Node]) -> dict[fx.Node, Fused]:
    """Poolings that take the dropout in front of them along."""
    found = {node: _dropped_pool(node) for node in graph.nodes if node in random}
    return {node: fused for node, fused in found.items() if fused is not None}


def _dropped_pool(pool: fx.Node) -> Fused | None:
    """The dropout in front of a pooling with small windows that tile its input, if nothing else uses it."""
    if pool.target not in MAX_POOLS:
        return None
    dropout = pool.args[0]
    if not isinstance(dropout, fx.Node) or not is_lone_dropout(dropout):
        return None
    x, drop_probability = dropout.args[:2]
    given = bind(pool.target, pool.args, pool.kwargs)  # type: ignore[arg-type]
    geometry = [given[name] for name in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")]
    n_dims = MAX_POOLS[pool.target]
    windows = Windows.of(dropout.meta["val"].shape[-n_dims:], *geometry)
    if not windows.tile or math.prod(windows.kernel) > _LARGEST:
        return None
    return Fused(DroppedPool(n_dims), (x, drop_probability, *geometry), (dropout,))


class DroppedPool:
    """max_pool(dropout(x)) as one operator."""

    role = Role.SOURCE

    def __init__(self, n_dims: int) -> None:
        self.n_dims = n_dims

    def propagate(self, x: Any, drop_probability: float, *geometry: Any) -> Propagated:
        random = is_moments(x)
        if not random:
            x = Moments(x, torch.zeros_like(x))
        p = drop_probability
        windows = Windows.of(x.shape[-self.n_dims :], *geometry)
        elements = Elements.of(x, windows, correlated=True)
        cases = _cases(elements.scaled(1 / (1 - p)))
        n = len(windows.positions)
        kept = [bin(number).count("1") for number in range(1, 2**n)]
        chances = cases.mean.new_tensor([(1 - p) ** k * p ** (n - k) for k in kept])
        complete = torch.arange(1, 2**n, device=x.device) == 2**n - 1
        chances, complete = (v.reshape(-1, *[1] * (cases.mean.dim() - 1)) for v in (chances, complete))
        best = _above_zero(cases, ~complete)
        mean = (chances * best.mean).sum(0)
        second = (chances * (best.variance + best.mean * best.mean)).sum(0)
        weights = {position: (chances * w).sum(0) / (1 - p) for position, w in best.weights.items()}
        variance = (second - mean * mean).clamp_min(0)
        answer = pooled(mean, variance, windows, weights, elements, x.mean)
        if random:
            return answer
        assert answer.linearize is not None
        linearize = answer.linearize
        return Propagated(answer.moments, lambda: source(*linearize().noise))


def _cases(kept: Elements) -> Maximum:
    """The maxima of all sets of elements but the empty one, stacked in front.

    Bit i of a set's number, counted from 1, says whether it holds element i: with one element more, the sets
    so far are followed by that element alone, and by each of them with it.
    """
    first, *others = kept.moments
    found = _stacked(Maximum.of(kept, first))
    for position in others:
        alone = _stacked(Maximum.of(kept, position))
        found = _joined(found, alone, found.against(kept, position))
    return found


def _stacked(one: Maximum) -> Maximum:
    weights = {p: w[None] for p, w in one.weights.items()}
    shared = {p: None if c is None else c[None] for p, c in one.shared.items()}
    return Maximum(one.mean[None], one.variance[None], weights, shared)


def _joined(*parts: Maximum) -> Maximum:
    """One behind the other; what a part does not know is zero."""

    def join(values: list[Tensor | None]) -> Tensor:
        known = [
            torch.zeros_like(part.mean) if v is None else v.expand_as(part.mean)
            for v, part in zip(values, parts, strict=True)
        ]
        return torch.cat(known)

    weights = {p: join([part.weights.get(p) for part in parts]) for p in parts[-1].weights}
    to_come = {p: [part.shared.get(p) for part in parts] for p in parts[-1].shared}
    shared = {p: None if all(v is None for v in values) else join(values) for p, values in to_come.items()}
    mean, variance = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
    return Maximum(mean, variance, weights, shared)


def _above_zero(best: Maximum, dropped: Tensor) -> Maximum:
    """The maximum with zero, where something is dropped."""
    mean, variance = relu_moments(best.mean, best.variance)
    positive = torch.where(dropped, positive_probability(best.mean, best.variance), 1.0)
    weights: dict[Position, Tensor] = {p: w * positive for p, w in best.weights.items()}
    mean, variance = torch.where(dropped, mean, best.mean), torch.where(dropped, variance, best.variance)
    return Maximum(mean, variance, weights, {})
