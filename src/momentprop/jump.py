"""Dropout, a dense layer and an activation in a row: sources act by their response, not by a local gain.

With a small drop probability noise is rare jumps, not Gaussian: dropping one input moves a unit by many of
its standard deviations, the activation bends that jump, and a local gain does not see it. So a unit is
conditioned on each of its inputs, kept (it contributes w_ij x_j / (1-p)) or dropped (0), and the response

    d_ij = E[f(z_i) | j kept] - E[f(z_i) | j dropped]

takes the place of gain times jump. Source j then adds p(1-p) d_j d_j^T to the units' covariance: the
first-order term of the Hoeffding decomposition, exact up to interactions of two or more dropped inputs.

The expectations run over the masks of all other inputs. Those of a unit's three largest contributors are
enumerated; the others together count as Gaussian. Mean, variance and gain of a unit are the mixture over the
same patterns, and noise is what its variance exceeds the responses.

This takes 16 evaluations of the activation's mean per weight and sample, so it is done where jumps matter
and the layer is small. Measured on a hidden layer of 50 units over standard normal inputs, std over MC std,
5..95 %:

    inputs n, p      p n     gain            response
    8, 0.005         0.04    0.85 .. 1.08    0.97 .. 1.04
    8, 0.05          0.4     0.88 .. 1.05    0.98 .. 1.01
    32, 0.05         1.6     0.97 .. 1.02    0.99 .. 1.01
    8, 0.3           2.4     0.97 .. 1.02    0.99 .. 1.01
    128, 0.05        6.4     0.98 .. 1.02    0.99 .. 1.01
    512, 0.05        26      0.99 .. 1.01    0.99 .. 1.01

Beyond p n = 4 there is nothing left to gain; `pays` says so.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from momentprop.gaussian import safe_sqrt
from momentprop.local import Elementwise, Linear
from momentprop.moments import Moments, is_moments, mean_of
from momentprop.registry import RULES, Rule

aten = torch.ops.aten

_ENUMERATED = 3  # inputs of each unit
_MOST_DROPPED = 4.0  # expected number of dropped inputs, above which their sum is Gaussian enough
_MOST_WEIGHTS = 8192


def pays(n_inputs: int, n_units: int, drop_probability: float) -> bool:
    """Whether the response to single jumps is worth its cost for this layer."""
    return drop_probability * n_inputs <= _MOST_DROPPED and n_inputs * n_units <= _MOST_WEIGHTS


def find_jump(activation: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The dropout and the dense layer in front of an activation, if nothing else uses them and it pays."""
    rule = RULES.find(activation.target, "accurate")
    if rule is None or not rule.elementwise or rule.local is None or len(activation.args) != 1:
        return None
    layer = activation.args[0]
    if not isinstance(layer, fx.Node) or layer.target is not aten.linear.default or len(layer.users) > 1:
        return None
    dropout, weight = layer.args[0], layer.args[1]
    if not isinstance(dropout, fx.Node) or not isinstance(weight, fx.Node) or len(dropout.users) > 1:
        return None
    if dropout.target is not aten.dropout.default:
        return None
    n_units, n_inputs = weight.meta["val"].shape
    return (dropout, layer) if pays(n_inputs, n_units, dropout.args[1]) else None  # type: ignore[arg-type]


class Jumped(Moments):
    """An activation's moments, with what the adjoint needs."""

    response: Tensor  # d_ij sqrt(p(1-p)): [..., units, inputs]
    gain: Any
    passing: Tensor | None  # variance of the part of a unit that passes by the gain


class Jump:
    """activation(linear(dropout(x))) as one operator, with its moments and its linear part."""

    def __init__(self, activation: Rule) -> None:
        self.activation = activation

    def __call__(self, x: Any, drop_probability: float, weight: Tensor, bias: Tensor | None) -> Jumped:
        p, mean = drop_probability, mean_of(x)
        odds = p / (1 - p)
        contributions = weight * mean[..., None, :]  # [..., units, inputs]
        squares = odds * contributions * contributions
        passing = F.linear(x.variance * (1 + odds), weight * weight) if is_moments(x) else None
        count = min(_ENUMERATED, weight.shape[1])
        top, largest = squares.topk(count, -1)
        enumerated = contributions.gather(-1, largest)
        # variance of what is not enumerated, and of that without one more input
        rest = (squares.sum(-1) - top.sum(-1)).clamp_min(0)
        rest = rest if passing is None else rest + passing
        others = (rest[..., None] - squares).clamp_min(0)
        jump = contributions * odds  # w x / (1-p) - w x

        center = F.linear(mean, weight, bias)
        first: Any = 0.0
        second: Any = 0.0
        gain: Any = 0.0
        response: Any = 0.0
        responses: list[Any] = [0.0] * count
        for kept, probability in _patterns(count, p):
            shifts = [e * (odds if k else -1.0) for e, k in zip(enumerated.unbind(-1), kept, strict=True)]
            base = center + sum(shifts[1:], shifts[0])
            unit = self._moments(base, rest)
            first = first + probability * unit.mean
            second = second + probability * (unit.variance + unit.mean * unit.mean)
            gain = gain + probability * self._gain(base, rest)
            for i, k in enumerate(kept):
                responses[i] = responses[i] + unit.mean * (probability / (1 - p) if k else -probability / p)
            moved = self._mean(base[..., None] + jump, others)
            response = response + probability * (moved - self._mean(base[..., None] - contributions, others))
        out = Jumped(first, (second - first * first).clamp_min(0))
        response = response.scatter(-1, largest, torch.stack(responses, -1))
        out.response = response * math.sqrt(p * (1 - p))
        out.gain, out.passing = gain, passing
        return out

    def local(
        self, out: Jumped, x: Any, drop_probability: float, weight: Tensor, bias: Tensor | None
    ) -> Linear:
        response, gain = out.response, out.gain
        noise = out.variance - response.square().sum(-1)
        if out.passing is None:
            return Linear(lambda cotangent: [], noise.clamp_min(0), lambda c: _along(c, response))
        noise = (noise - gain * gain * out.passing).clamp_min(0)
        lost = safe_sqrt(x.variance * (drop_probability / (1 - drop_probability)))  # random, and dropped

        def pull(cotangent: Tensor) -> list[Tensor]:
            return [torch.matmul(cotangent * gain, weight)]

        def spread(cotangent: Tensor) -> Tensor:
            return torch.cat([_along(cotangent, response), pull(cotangent)[0] * lost], -1)

        return Linear(pull, noise, spread)

    def _moments(self, mean: Tensor, variance: Tensor) -> Moments:
        return self.activation.function(Moments(mean, variance))

    def _mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        return self._moments(mean, variance).mean

    def _gain(self, mean: Tensor, variance: Tensor) -> Any:
        x = Moments(mean, variance)
        assert self.activation.local is not None
        local = self.activation.local(self.activation.function(x), x)
        assert isinstance(local, Elementwise)
        return 1.0 if local.gain is None else local.gain


def _patterns(count: int, p: float) -> list[tuple[list[bool], float]]:
    """Every way to keep or drop so many inputs, and its probability."""
    patterns: list[tuple[list[bool], float]] = [([], 1.0)]
    for _ in range(count):
        kept = [([*k, True], q * (1 - p)) for k, q in patterns]
        patterns = kept + [([*k, False], q * p) for k, q in patterns]
    return patterns


def _along(cotangent: Tensor, response: Tensor) -> Tensor:
    """sum_i c_i d_ij: [K, ..., inputs]."""
    return torch.matmul(cotangent[..., None, :], response)[..., 0, :]
