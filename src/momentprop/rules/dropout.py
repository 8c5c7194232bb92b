"""Dropout: where the noise comes from.

Inverted dropout as in PyTorch: Y = X B / (1 - p) with B ~ Bernoulli(1 - p) independent of X, so

    E[Y] = E,    V[Y] = V + p / (1 - p) (E^2 + V).

Exact. (The paper's table is for dropout without rescaling; the two differ by the factor 1/(1-p).)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.local import Elementwise, Linear, Local
from momentprop.moments import Moments, mean_of
from momentprop.neighbours import attach, lattice, neighbours_of
from momentprop.registry import EXACT, rule

aten = torch.ops.aten


def _noise(out: Moments, x: Moments | Tensor, drop_probability: float, train: bool) -> Local:
    """p/(1-p) (E^2 + V), independently for every element."""
    return Elementwise(noise=_odds(drop_probability) * _second_moment(x))


def _channel_noise(out: Moments, x: Moments | Tensor, drop_probability: float, train: bool) -> Local:
    """One source per channel, acting along E: a dropped channel loses all its means at once.

    The part of x that is random itself is lost with them. That adds p/(1-p) Cov(x_i, x_j) within the
    channel, of which only the diagonal is known here: p/(1-p) V, element by element.
    """
    odds = _odds(drop_probability)
    direction = mean_of(x) * odds**0.5

    def spread(cotangent: Tensor) -> Tensor:
        along = cotangent * direction
        return along.sum(list(range(3, along.dim()))) if along.dim() > 3 else along

    if isinstance(x, Moments):
        return Linear(lambda cotangent: [cotangent], odds * x.variance, spread)
    return Linear(lambda cotangent: [], None, spread)


def _odds(drop_probability: float) -> float:
    return drop_probability / (1 - drop_probability)


def _second_moment(x: Moments | Tensor) -> Tensor:
    mean = mean_of(x)
    return mean * mean + x.variance if isinstance(x, Moments) else mean * mean


def dropout(x: Moments | Tensor, drop_probability: float, train: bool) -> Any:
    """Masks are independent, so elements are correlated as they were before."""
    out = _moments(x, drop_probability, train)
    return attach(out, neighbours_of(x)) if isinstance(out, Moments) else out


def channel_dropout(x: Moments | Tensor, drop_probability: float, train: bool) -> Any:
    """Element by element as dropout; elements of a channel share their fate."""
    out = _moments(x, drop_probability, train)
    if out is x or not isinstance(out, Moments):
        return out
    mean, inner, odds = out.mean, neighbours_of(x), _odds(drop_probability)

    def told(start: list[int], step: list[int], count: list[Any], shift: list[int]) -> Tensor:
        there = [a + b for a, b in zip(start, shift, strict=True)]
        common = lattice(mean, start, step, count) * lattice(mean, there, step, count) * odds
        before = None if inner is None else inner(start, step, count, shift)
        return common if before is None else common + before * (1 + odds)

    return attach(out, told)


def _moments(x: Moments | Tensor, drop_probability: float, train: bool) -> Moments | Tensor:
    if not train or drop_probability == 0:
        return x
    noise = _odds(drop_probability) * _second_moment(x)
    return Moments(mean_of(x), x.variance + noise if isinstance(x, Moments) else noise)


_OF_DROPOUT: Any = {"exactness": EXACT, "reference": "paper, dropout", "creates_noise": True}
rule(aten.dropout.default, local=_noise, **_OF_DROPOUT)(dropout)
rule(aten.feature_dropout.default, local=_channel_noise, **_OF_DROPOUT)(channel_dropout)
