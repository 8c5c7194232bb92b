"""Dropout, a dense layer and an activation in a row: sources act by their response, not by a local gain.

With a small drop probability noise is rare jumps, not Gaussian: dropping one input moves a unit by many of
its standard deviations, the activation bends that jump, and a local gain does not see it. So a unit is
conditioned on each of its inputs, kept (it contributes w_ij x_j / (1-p)) or dropped (0), and the response

    d_ij = E[f(z_i) | j kept] - E[f(z_i) | j dropped]

takes the place of gain times jump. Source j then adds p(1-p) d_j d_j^T to the units' covariance: the
first-order term of the Hoeffding decomposition, exact up to interactions of two or more dropped inputs.

The expectations run over the masks of all other inputs. A unit's largest contributor is kept or dropped,
each case by itself, and the sum of the others counts as Gaussian. Mean, variance and gain of a unit are the
mixture of the two cases, and noise is what its variance exceeds the responses.

Where few inputs are dropped at a time and they are not random themselves, pairs.py has it more exactly, and
cheaper. Otherwise this takes four evaluations of the activation's mean per weight and sample, so it is done
where jumps matter and the layer is small. Measured on trained networks, the first four of one hidden layer
of 50 units over inputs that are dropped, the others of three hidden layers of 8 to 32 with dropout behind
each (p n: inputs dropped at a time; std over MC std, 5..95 %; MC samples that the result is worth):

    network, n, p        p n    gain                 response
    naval, 16, 0.2       3.2    0.86 .. 1.88, 19     0.99 .. 1.10, 200
    boston, 13, 0.2      2.6    0.87 .. 1.29, 74     0.96 .. 1.01, 1,900
    wine, 11, 0.2        2.2    0.93 .. 1.21, 89     0.98 .. 1.01, 5,900
    kin8nm, 8, 0.4       3.2    0.91 .. 1.00, 380    0.92 .. 1.00, 620
    boston, 16, 0.2      3.2    0.89 .. 1.08, 180    0.95 .. 1.03, 600
    boston, 32, 0.1      3.2    0.90 .. 1.10, 180    0.96 .. 1.02, 570
    energy, 16, 0.1      1.6    0.69 .. 1.44, 41     0.79 .. 1.06, 190
    energy, 8, 0.2       1.6    0.84 .. 1.04, 130    0.90 .. 1.05, 460

Beyond p n = 4 there is little left to gain; `pays` says so. With the three largest contributors case by case,
and the case by itself that no other is dropped, boston of 16 units was worth 750, energy 250, in
five times the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from momentprop.engine import pairs
from momentprop.engine.fused import Fused
from momentprop.gaussian.normal import safe_sqrt
from momentprop.graph.reach import is_lone_dropout
from momentprop.moments import Moments, is_moments, mean_of
from momentprop.passes.coverage import is_linearized
from momentprop.rules.linearization import Linearization, Propagated, Scaled, Spread, mapped, source
from momentprop.rules.registry import RULES, Role, Rule

aten = torch.ops.aten

_MOST_DROPPED = 4.0  # expected number of dropped inputs, above which their sum is Gaussian enough
_MOST_WEIGHTS = 8192


def pays(n_inputs: int, n_units: int, drop_probability: float) -> bool:
    """Say whether the response to single jumps is worth its cost for this layer."""
    return drop_probability * n_inputs <= _MOST_DROPPED and n_inputs * n_units <= _MOST_WEIGHTS


def jumps(graph: fx.Graph, random: Collection[fx.Node]) -> dict[fx.Node, Fused]:
    """Activations that take the dropout and the dense layer in front of them along."""
    found = {node: _jump(node) for node in graph.nodes if node in random}
    return {node: fused for node, fused in found.items() if fused is not None}


def _jump(activation: fx.Node) -> Fused | None:
    """The dropout and the dense layer in front of an activation, if nothing else uses them and it pays."""
    rule = RULES.find(activation.target)
    if rule is None or not rule.elementwise or not is_linearized(activation, rule):
        return None
    layer, *constants = activation.args
    if any(isinstance(value, fx.Node) for value in (*constants, *activation.kwargs.values())):
        return None
    if not isinstance(layer, fx.Node) or layer.target is not aten.linear.default or len(layer.users) > 1:
        return None
    dropout, weight, bias = (*layer.args, None)[:3]
    if not isinstance(dropout, fx.Node) or not isinstance(weight, fx.Node) or not is_lone_dropout(dropout):
        return None
    x, drop_probability = dropout.args[:2]
    n_units, n_inputs = weight.meta["val"].shape
    if not pays(n_inputs, n_units, drop_probability):  # type: ignore[arg-type]
        return None
    jump = Jump(rule, tuple(constants), dict(activation.kwargs))
    return Fused(jump, (x, drop_probability, weight, bias), (dropout, layer))


class Jump:
    """activation(linear(dropout(x))) as one operator, with its moments and its linear part."""

    def __init__(
        self, activation: Rule, constants: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> None:
        self.activation = activation
        self.constants, self.keywords = constants, keywords or {}  # the activation's further arguments

    role = Role.MASK

    def propagate(self, x: Any, drop_probability: float, weight: Tensor, bias: Tensor | None) -> Propagated:
        if not is_moments(x) and pairs.pays(weight.shape[1], drop_probability):
            return self._by_pairs(x, drop_probability, weight, bias)
        p, mean = drop_probability, mean_of(x)
        odds = p / (1 - p)
        contributions = weight * mean[..., None, :]  # [..., units, inputs]
        jump = contributions * odds  # what an input adds to the mean when it is kept: w x / (1-p) - w x
        squares = contributions * jump
        largest = squares.argmax(-1, keepdim=True)
        own = contributions.gather(-1, largest)[..., 0]
        center = F.linear(mean, weight, bias)
        passing = F.linear(x.variance * (1 + odds), weight * weight) if is_moments(x) else None

        # the largest contributor kept and dropped, the others a Gaussian
        others = (squares.sum(-1) - squares.gather(-1, largest)[..., 0]).clamp_min(0)
        variance = others if passing is None else others + passing
        cases = [(1 - p, center + odds * own), (p, center - own)]
        units = [self._moments(at, variance) for _, at in cases]
        first: Any = sum(chance * unit.mean for (chance, _), unit in zip(cases, units, strict=True))
        gain: Any = sum(chance * self._gain(at, variance) for chance, at in cases)
        # around the mean: small differences of squares would be lost
        second: Any = 0.0
        for (chance, _), unit in zip(cases, units, strict=True):
            second = second + chance * (unit.variance + (unit.mean - first).square())
        # and without one more input
        without = (others[..., None] - squares).clamp_min(0)
        without = without if passing is None else without + passing[..., None]
        response: Any = 0.0
        for chance, at in cases:
            kept, dropped = at[..., None] + jump, at[..., None] - contributions
            response = response + chance * (self._mean(kept, without) - self._mean(dropped, without))
        response = response.scatter(-1, largest, (units[0].mean - units[1].mean)[..., None])
        response = response * math.sqrt(p * (1 - p))

        def linearize() -> Linearization:
            noise = second - response.square().sum(-1)
            drops = Spread(lambda cotangent: _along(cotangent, response), p)
            if passing is None:
                return source(noise.clamp_min(0), drops)
            lost = safe_sqrt(x.variance * odds)  # random, and dropped

            def pull(cotangent: Tensor) -> list[Tensor]:
                return [torch.matmul(cotangent * gain, weight)]

            noise = (noise - gain * gain * passing).clamp_min(0)
            return mapped(pull, noise, drops, Spread(lambda cotangent: pull(cotangent)[0] * lost))

        return Propagated(Moments(first, second), linearize)

    def _by_pairs(self, x: Tensor, p: float, weight: Tensor, bias: Tensor | None) -> Propagated:
        def activation(z: Tensor) -> Any:
            return self.activation.op(z, *self.constants, **self.keywords)

        found = pairs.answers(activation, x, p, weight, bias)

        def linearize() -> Linearization:
            return source(
                Spread(lambda cotangent: _along(cotangent, found.single), p),
                Spread(lambda cotangent: _along(cotangent, found.double)),
            )

        return Propagated(Moments(found.mean, found.variance), linearize)

    def _moments(self, mean: Tensor, variance: Tensor) -> Moments:
        found: Moments = self.activation(Moments(mean, variance), *self.constants, **self.keywords)
        return found

    def _mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        return self._moments(mean, variance).mean

    def _gain(self, mean: Tensor, variance: Tensor) -> Any:
        found = self.activation.propagate(Moments(mean, variance), *self.constants, **self.keywords)
        assert found.linearize is not None
        map = found.linearize().map
        assert isinstance(map, Scaled)
        return 1.0 if map.gain is None else map.gain


def _along(cotangent: Tensor, response: Tensor) -> Tensor:
    """sum_i c_i d_ij: [K, ..., inputs]."""
    return torch.matmul(cotangent[..., None, :], response)[..., 0, :]
