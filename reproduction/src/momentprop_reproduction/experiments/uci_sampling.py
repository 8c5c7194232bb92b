"""MC dropout of the small stacked networks, for choosing among them: only the likelihood is needed.

The choice takes 10,000 samples of 240 networks a set. `mp.monte_carlo` draws a mask for every element; here
the few dropped ones are drawn (`uci_draws.dropped`), which gives the same distribution in a fraction of the
time (`tests/test_uci_sampling.py` compares the two).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop_reproduction.experiments.uci_draws import dropped

_ROWS = 8192  # evaluations at once: their hidden layer stays in the cache
_CHUNK = 2**17  # evaluations that are turned into likelihoods at once


@dataclass(frozen=True, eq=False)
class Mixture:
    """Holds what T samples f_t of a network say about targets y, per observation."""

    log_likelihood: Tensor  # log of the mean over t of N(y; f_t, noise)
    mean: Tensor  # of f_t
    variance: Tensor  # of f_t, unbiased


def sample_mixture(
    parameters: tuple[Tensor, Tensor, Tensor],
    features: Tensor,
    target: Tensor,
    *,
    drop_probability: float,
    noise: float,
    n_samples: int,
    rng: Any,
) -> Mixture:
    """MC dropout of one network with dropout before both its dense layers.

    Args:
        parameters: first layer [Q + 1, H], the bias as last row; second [H]; its bias.
        features: [n, Q].
        target: [n].
        drop_probability: of both dropouts.
        noise: its variance, in the units of `target`.
        n_samples: T.
        rng: a stream of `uci_draws`.
    """
    sampler = _Sampler(parameters, features, drop_probability, rng)
    n, y = len(target), target.to(features.dtype)
    logs = torch.full((n,), -math.inf, dtype=torch.float64)
    center = sampler.certain()  # squares around about the mean do not cancel
    total, squares = torch.zeros_like(logs), torch.zeros_like(logs)
    at_once = max(1, _CHUNK // n)
    for done in range(0, n_samples, at_once):
        sampled = sampler.draw(min(at_once, n_samples - done))
        logs = torch.logaddexp(logs, (sampled - y).square_().mul_(-0.5 / noise).logsumexp(0).double())
        deviations = sampled.sub_(center)
        total += deviations.sum(0)
        squares += deviations.square_().sum(0)
    mean = total / n_samples
    return Mixture(
        log_likelihood=logs - math.log(n_samples) - 0.5 * math.log(2 * math.pi * noise),
        mean=center + mean,
        variance=(squares - n_samples * mean.square()).clamp_min(0) / max(n_samples - 1, 1),
    )


class _Sampler:
    """Draws samples [count, n] of the network's output."""

    def __init__(
        self, parameters: tuple[Tensor, Tensor, Tensor], features: Tensor, drop_probability: float, rng: Any
    ) -> None:
        self.first, second, self.bias = parameters
        self.p, self.rng = drop_probability, rng
        self.n, self.n_features = features.shape
        scale = 1 / (1 - drop_probability)
        self.second = second.unsqueeze(0) * scale
        self.inputs = torch.cat([features * scale, features.new_ones(self.n, 1)], 1)
        self.tiled = self.inputs.repeat(max(1, _ROWS // self.n), 1)
        self.x = torch.empty_like(self.tiled)
        self.hidden = self.first.new_empty(self.first.shape[1] * len(self.tiled))

    def certain(self) -> Tensor:
        """The output with nothing dropped."""
        x = self.inputs * torch.tensor([1 - self.p] * self.n_features + [1.0])
        hidden = (x @ self.first).relu_()
        return hidden @ self.second[0] * (1 - self.p) + self.bias

    def draw(self, count: int) -> Tensor:
        out = self.inputs.new_empty(count * self.n)
        for part in out.split(len(self.tiled)):
            size = len(part)
            x, hidden = self.x[:size], self.hidden[: size * self.first.shape[1]].view(-1, size)
            x.copy_(self.tiled[:size])
            places = dropped(self.rng, size * self.n_features, self.p)
            x.view(-1).numpy()[places + places // self.n_features] = 0  # one more column, of ones
            # hidden units are rows, as in training
            torch.mm(self.first.T, x.T, out=hidden)
            hidden.relu_()
            hidden.view(-1).numpy()[dropped(self.rng, hidden.numel(), self.p)] = 0
            torch.mm(self.second, hidden, out=part.unsqueeze(0))
        return out.add_(self.bias).view(count, self.n)
