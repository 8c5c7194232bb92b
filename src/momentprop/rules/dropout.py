"""Dropout: where the noise comes from.

Inverted dropout as in PyTorch: Y = X B / (1 - p) with B ~ Bernoulli(1 - p) independent of X, so

    E[Y] = E,    V[Y] = V + p / (1 - p) (E^2 + V).

Exact. (The paper's table is for dropout without rescaling; the two differ by the factor 1/(1-p).)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments, mean_of
from momentprop.registry import EXACT, rule

aten = torch.ops.aten


@rule(
    aten.dropout.default,
    aten.feature_dropout.default,  # one mask per channel: the same moments element by element
    exactness=EXACT,
    reference="paper, dropout",
    creates_noise=True,
)
def dropout(x: Moments | Tensor, drop_probability: float, train: bool) -> Any:
    if not train or drop_probability == 0:
        return x
    mean = mean_of(x)
    odds = drop_probability / (1 - drop_probability)
    if isinstance(x, Moments):
        return Moments(mean, x.variance + odds * (mean * mean + x.variance))
    return Moments(mean, odds * (mean * mean))
