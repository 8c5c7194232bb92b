"""The operators that draw random numbers, as functions of numbers drawn elsewhere.

Sampling feeds noise in as inputs (sampler.py). For that every such operator is split into what is drawn, raw
bits or standard normal or uniform numbers, and a function of it and of the operator's own arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# (count, shape, dtype, generator) -> [count, *shape]
Generate = Callable[[int, list[int], torch.dtype, torch.Generator], Tensor]


@dataclass(frozen=True)
class Draw:
    """Says how one operator is sampled."""

    generate: Generate
    apply: Callable[..., Tensor]  # (drawn, *arguments of the operator)
    per_channel: bool = False  # one number for all elements of a channel


def random_bits(count: int, shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Uniform int32 [count, *shape] over its whole range, drawn two at a time."""
    n = math.prod(shape)
    pairs = torch.empty(count, (n + 1) // 2, dtype=torch.int64, device=generator.device)
    bits = pairs.random_(-(2**63), None, generator=generator).view(torch.int32)
    return bits[:, :n].reshape(count, *shape)


def standard_normal(count: int, shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Drawn in multiples of 16 a sample: generators make so many at a time, and numbers would depend on
    how samples are batched."""
    n = math.prod(shape)
    single = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    rows = torch.randn(count, -(-n // 16) * 16, dtype=single, device=generator.device, generator=generator)
    return rows[:, :n].reshape(count, *shape).to(dtype)


def _uniform(count: int, shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.rand(count, *shape, dtype=dtype, device=generator.device, generator=generator)


def _is_one(bits: Tensor, probability: float) -> Tensor:
    """Return True with this probability, to 2^-32."""
    return bits < min(round(probability * 2**32) - 2**31, 2**31 - 1)


def drop(bits: Tensor, x: Tensor, drop_probability: float, train: bool = True) -> Tensor:
    """Apply inverted dropout with the mask given by uniform 32-bit integers."""
    return torch.where(_is_one(bits, 1 - drop_probability), x * (1 / (1 - drop_probability)), 0.0)


def alpha_drop(bits: Tensor, x: Tensor, drop_probability: float, train: bool = True) -> Tensor:
    """Keep a value or put SELU's limit, as the operator does, and scale to mean 0 and variance 1 again."""
    p, limit = drop_probability, -1.7580993408473766
    scale = ((limit**2 * p + 1) * (1 - p)) ** -0.5
    return torch.where(_is_one(bits, 1 - p), x, limit) * scale - limit * scale * p


def _bernoulli(bits: Tensor, like: Tensor, p: float = 0.5, generator: Any = None) -> Tensor:
    return _is_one(bits, p).to(like.dtype)


def _bernoulli_of(uniform: Tensor, probability: Tensor, generator: Any = None) -> Tensor:
    return (uniform < probability).to(probability.dtype)


def _itself(drawn: Tensor, *args: Any, **options: Any) -> Tensor:
    return drawn


def _scaled_like(normal: Tensor, like: Tensor, mean: float = 0, std: float = 1, **options: Any) -> Tensor:
    return normal * std + mean


def _scaled(normal: Tensor, mean: Any, std: Any = 1.0, *size: Any, **options: Any) -> Tensor:
    return normal * std + mean


def _between(uniform: Tensor, like: Tensor, low: float = 0.0, high: float = 1.0, **options: Any) -> Tensor:
    return uniform * (high - low) + low


DRAWS: dict[Any, Draw] = {
    aten.dropout.default: Draw(random_bits, drop),
    aten.feature_dropout.default: Draw(random_bits, drop, per_channel=True),
    aten.alpha_dropout.default: Draw(random_bits, alpha_drop),
    aten.feature_alpha_dropout.default: Draw(random_bits, alpha_drop, per_channel=True),
    aten.bernoulli.p: Draw(random_bits, _bernoulli),
    aten.bernoulli.default: Draw(_uniform, _bernoulli_of),
    aten.randn.default: Draw(standard_normal, _itself),
    aten.randn_like.default: Draw(standard_normal, _itself),
    aten.rand.default: Draw(_uniform, _itself),
    aten.rand_like.default: Draw(_uniform, _itself),
    aten.normal_functional.default: Draw(standard_normal, _scaled_like),
    aten.normal.float_float: Draw(standard_normal, _scaled),
    aten.normal.Tensor_float: Draw(standard_normal, _scaled),
    aten.normal.float_Tensor: Draw(standard_normal, _scaled),
    aten.normal.Tensor_Tensor: Draw(standard_normal, _scaled),
    aten.uniform.default: Draw(_uniform, _between),
}
CENTERS: dict[Generate, float] = {standard_normal: 0.0, _uniform: 0.5}  # numbers for which noise is its mean
