"""Features and target with mean 0 and standard deviation 1 over the training part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scaling:
    """Says how a training part is standardised."""

    mean: Tensor  # [Q]
    std: Tensor  # [Q]
    target_mean: float
    target_std: float

    @classmethod
    def of(cls, features: Tensor, target: Tensor) -> Scaling:
        """The scaling under which these have mean 0 and standard deviation 1; constant features become 0."""
        mean, std = features.mean(0), features.std(0, correction=0)
        # the computed std of a constant is a rounding error, not always zero; Naval has two constants
        std = torch.where(std <= 1e-9 * mean.abs(), 1.0, std)
        return cls(mean, std, target.mean().item(), target.std(correction=0).item())

    def inputs(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.std

    def outputs(self, target: Tensor) -> Tensor:
        return (target - self.target_mean) / self.target_std
