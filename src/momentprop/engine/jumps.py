"""What single dropped inputs and units do to the outputs: the largest of them, as the sweep back meets them.

Variance says how much an output moves, not how. Where drop probabilities are small it stands still most of
the time and jumps now and then, one jump for every dropped element: to first order the output is its mean
plus independent two-point variables, and the sweep back knows each of them, cotangent times what is lost. The
m largest of every output are kept by name; all others together are close to Gaussian.

What the variance exceeds the sum over all of them is their interactions, of jumps too: so effects are scaled
to make up the whole variance. Not where other noise than masks comes in (uncertain inputs, Gaussian noise):
that is no jump.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.engine.layouts import Layout
from momentprop.gaussian.normal import safe_sqrt
from momentprop.moments import Jumps


class Sources:
    """The largest two-point sources, as rows [batch, K, sources]: kept less dropped, times sqrt(p(1-p))."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.rows: list[Tensor] = []
        self.probabilities: list[Tensor] = []
        self.variance: Any = 0.0  # of all sources, the small ones too: [batch, K]

    def add(self, rows: Tensor, drop_probability: float) -> None:
        self.variance = self.variance + rows.square().sum(-1)
        if rows.shape[-1] > self.largest:
            rows = rows.gather(-1, rows.abs().topk(self.largest, -1).indices)
        self.rows.append(rows)
        self.probabilities.append(rows.new_full((rows.shape[-1],), drop_probability))

    def of(self, start: int, count: int) -> Sources:
        """Those of so many of the K outputs."""
        found = Sources(self.largest)
        found.rows = [rows[:, start : start + count] for rows in self.rows]
        found.probabilities = list(self.probabilities)
        if isinstance(self.variance, Tensor):
            found.variance = self.variance[:, start : start + count]
        return found

    def jumps(self, output: Tensor, layout: Layout, variance: Tensor | None) -> Jumps | None:
        """The jumps of an output; scaled so that all sources make up the variance [batch, K], if given."""
        if not self.rows:
            return None
        rows = torch.cat(self.rows, -1)
        p = torch.cat(self.probabilities).expand(rows.shape)
        if rows.shape[-1] > self.largest:
            chosen = rows.abs().topk(self.largest, -1).indices
            rows, p = rows.gather(-1, chosen), p.gather(-1, chosen)
        effects = -rows / (p * (1 - p)).sqrt()
        if variance is not None:
            effects = effects * (safe_sqrt(variance) / safe_sqrt(self.variance))[..., None]
        every = [layout.restored(v.movedim(-1, 0), output) for v in (effects, p)]
        return Jumps(*every)
