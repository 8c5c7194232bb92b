"""Adds up what the backward sweep is for: each object is shown every source of noise it meets."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from momentprop.engine.layouts import Layout
from momentprop.gaussian.normal import safe_sqrt
from momentprop.moments import Jumps
from momentprop.rules.linearization import Noise, Split


class Accumulator(Protocol):
    """Adds up something over all sources of noise."""

    def add(self, cotangent: Tensor, noise: Noise, split: Split) -> None:
        """One kind of noise of one value, and the cotangent [K, *shape] of that value."""


class Covariance:
    """The covariance of the K outputs: the sum over sources of J_s diag(noise_s) J_s^T."""

    def __init__(self) -> None:
        self.total: Any = None

    def add(self, cotangent: Tensor, noise: Noise, split: Split) -> None:
        part = noise.covariance(cotangent, split)
        self.total = part if self.total is None else self.total + part

    def result(self, batch: Any, like: Tensor) -> Tensor:
        """[batch, K, K]; `like` is a cotangent [K, ...], for where no noise reaches an output."""
        if self.total is None:
            return like.new_zeros(batch, like.shape[0], like.shape[0])
        return (self.total + self.total.mT) / 2


class Largest:
    """Keeps the dropped inputs and units that move each output most.

    Variance says how much an output moves, not how. Where drop probabilities are small it stands still most
    of the time and jumps now and then, one jump for every dropped element: to first order the output is its
    mean plus independent two-point variables, and the sweep back knows each of them, cotangent times what is
    lost. The m largest of every output are kept by name; all others together are close to Gaussian.

    What the variance exceeds the sum over all of them is their interactions, of jumps too: so effects are
    scaled to make up the whole variance. Not where other noise than masks comes in (uncertain inputs,
    Gaussian noise): that is no jump.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: list[Tensor] = []  # [batch, K, sources]: kept less dropped, times sqrt(p(1-p))
        self.probabilities: list[Tensor] = []
        self.variance: Any = 0.0  # of all sources, the small ones too: [batch, K]

    def add(self, cotangent: Tensor, noise: Noise, split: Split) -> None:
        for rows, drop_probability in noise.masks(cotangent):
            self.keep(split(rows), drop_probability)

    def keep(self, rows: Tensor, drop_probability: float) -> None:
        """Sources [batch, K, sources], of which the largest are kept."""
        self.variance = self.variance + rows.square().sum(-1)
        if rows.shape[-1] > self.number:
            rows = rows.gather(-1, rows.abs().topk(self.number, -1).indices)
        self.rows.append(rows)
        self.probabilities.append(rows.new_full((rows.shape[-1],), drop_probability))

    def of(self, start: int, count: int) -> Largest:
        """Those of so many of the K outputs."""
        found = Largest(self.number)
        found.rows = [rows[:, start : start + count] for rows in self.rows]
        found.probabilities = list(self.probabilities)
        if isinstance(self.variance, Tensor):
            found.variance = self.variance[:, start : start + count]
        return found

    def result(self, output: Tensor, layout: Layout, variance: Tensor | None) -> Jumps | None:
        """The jumps of an output; scaled so that all sources make up the variance [batch, K], if given."""
        if not self.rows:
            return None
        rows = torch.cat(self.rows, -1)
        p = torch.cat(self.probabilities).expand(rows.shape)
        if rows.shape[-1] > self.number:
            chosen = rows.abs().topk(self.number, -1).indices
            rows, p = rows.gather(-1, chosen), p.gather(-1, chosen)
        effects = -rows / (p * (1 - p)).sqrt()
        if variance is not None:
            effects = effects * (safe_sqrt(variance) / safe_sqrt(self.variance))[..., None]
        every = [layout.restored(v.movedim(-1, 0), output) for v in (effects, p)]
        return Jumps(*every)
