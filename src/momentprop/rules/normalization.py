"""Batch norm with running statistics: an affine map per channel.

E' = gamma (E - running_mean) / sqrt(running_var + eps) + beta,    V' = V gamma^2 / (running_var + eps).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments
from momentprop.rules.families import affine, only_random
from momentprop.rules.linearization import Propagated
from momentprop.rules.registry import EXACT, rule

aten = torch.ops.aten


def _refuses(arguments: Mapping[str, Any], random: frozenset[str]) -> str | None:
    if arguments.get("training") or arguments["running_var"] is None:
        return "it normalises with the statistics of the batch, which are random; use running statistics"
    return only_random("input")(arguments, random)


def _scale(x: Tensor, weight: Tensor | None, running_var: Tensor, eps: float) -> Tensor:
    """gamma / sqrt(running_var + eps), in the shape of a channel of x."""
    scale = (running_var + eps).rsqrt()
    if weight is not None:
        scale = weight * scale
    return scale.reshape(-1, *[1] * (x.dim() - 2))


@rule(aten.batch_norm.default, exactness=EXACT, reference="affine", refuses=_refuses)
def batch_norm(
    x: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Propagated:
    mean = aten.batch_norm.default(
        x.mean, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled
    )
    scale = _scale(x.mean, weight, running_var, eps)
    return affine(Moments(mean, x.variance * (scale * scale)), x, scale)
