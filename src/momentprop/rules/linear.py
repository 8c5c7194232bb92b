"""Dense layers: mean `W E + b`, variance `(W*W) V`."""

from __future__ import annotations

import torch
from torch import Tensor

from momentprop.moments import Moments
from momentprop.rules.families import linear_map
from momentprop.rules.linearization import Pull

aten = torch.ops.aten


def _back(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Pull:
    return lambda cotangent: [torch.matmul(cotangent, weight)]


def _together(x: Moments, direction: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """sum_c (W_c d_c)^2 behind flattened channels: as many products as W x has, channel by channel."""
    if x.mean.dim() != 2 or direction.shape[0] != x.shape[0]:
        return None
    parts = direction.flatten(2).transpose(0, 1)  # [channels, batch, elements]
    rows = weight.unflatten(1, (parts.shape[0], -1)).permute(1, 2, 0)
    return torch.bmm(parts, rows).square().sum(0)


linear_map(aten.linear.default, pull=_back, together=_together)
