"""Writes operators out in others, where PyTorch has no decomposition into operators with rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    lengths = [torch.linalg.vector_norm(v, dim=dim).clamp_min(eps) for v in (x, y)]
    return (x * y).sum(dim) / (lengths[0] * lengths[1])


def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = ((x @ weight.movedim(0, -2).flatten(1)).unflatten(-1, (weight.shape[0], -1)) * y[..., None, :]).sum(
        -1
    )
    return out if bias is None else out + bias


def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    return torch.logsumexp(torch.stack(torch.broadcast_tensors(x, y)), 0)


def power_of_number(base: float, exponent: Tensor) -> Tensor:
    return torch.exp(exponent * math.log(base))


def var_mean(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return torch.var(x, dim, correction=int(unbiased), keepdim=keepdim), torch.mean(x, dim, keepdim)


def distances(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(x[..., :, None, :] - y[..., None, :, :], ord=p, dim=-1)


def lerp(x: Tensor, y: Tensor, weight: Any) -> Tensor:
    return x * (1 - weight) + y * weight


def product(x: Tensor, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    parts = x.unbind(dim)
    total = parts[0]
    for part in parts[1:]:
        total = total * part
    return total.unsqueeze(dim) if keepdim else total


def random_slope(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


def running_product(x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    totals: list[Tensor] = []
    for part in x.unbind(dim):
        totals.append(totals[-1] * part if totals else part)
    return torch.stack(totals, dim)


EXPANSIONS: dict[Any, Callable[..., Any]] = {
    aten.cosine_similarity.default: cosine_similarity,
    aten.bilinear.default: bilinear,
    aten.logaddexp.default: logaddexp,
    aten.pow.Scalar: power_of_number,
    aten.var_mean.dim: var_mean,
    aten.cdist.default: distances,
    aten.lerp.Scalar: lerp,
    aten.lerp.Tensor: lerp,
    aten.rrelu.default: random_slope,  # of eval mode: what draws numbers is not expanded
    aten.prod.dim_int: product,
    aten.cumprod.default: running_product,
}
