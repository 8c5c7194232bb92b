"""Noise so small that whatever follows acts on it as a linear map: its covariance is J J^T, by autograd."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SMALL = 1e-4  # its std, relative to the values


class SmallNoise(nn.Module):
    """Gaussian factors in training mode; or, while `given` is a list, factors to differentiate by."""

    def __init__(self) -> None:
        super().__init__()
        self.p = SMALL
        self.given: list[Tensor] | None = None
        self.scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.given is not None:
            self.given.append((self.scale * torch.randn_like(x)).requires_grad_())
            return x * (1 + self.given[-1])
        return x * (1 + self.p * torch.randn_like(x)) if self.training and self.p else x


def jacobian(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    """Of all outputs by all factors of small noise, [batch, K, n], where these are off by so much."""
    sources = [m for m in model.modules() if isinstance(m, SmallNoise)]
    given: list[Tensor] = []
    for source in sources:
        source.given, source.scale = given, scale
    with torch.enable_grad():
        columns = model(x).flatten(1).unbind(1)
        rows = [
            torch.autograd.grad(c.sum(), given, retain_graph=True, materialize_grads=True) for c in columns
        ]
    for source in sources:
        source.given = None
    return torch.stack([torch.cat([g.flatten(1) for g in row], 1) for row in rows], 1)
