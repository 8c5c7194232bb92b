"""Moments as operators of PyTorch: of ReLU, of the maximum of two, of max pooling (rules/max_pooling.py).

Exporters then see one node where there are thirty, and can write it in the way that suits their runtime
(exports/onnx_operators.py). Everything else sees through them: they are composite, so autograd, compilers and
`torch.func` work on what they are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from momentprop import gaussian

_LIBRARY = torch.library.Library("momentprop", "DEF")


def composite(schema: str, function: Callable[..., Any]) -> OpOverload:
    """The function as an operator of this schema."""
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    for key in ("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition"):  # the second for torch.vmap
        _LIBRARY.impl(name, function, key)
    op: OpOverload = getattr(torch.ops.momentprop, name).default
    return op


RELU_MOMENTS = composite(
    "relu_moments(Tensor mean, Tensor variance) -> (Tensor, Tensor)", gaussian.relu_moments
)
MAX_MOMENTS = composite(
    "max_moments(Tensor mean_1, Tensor variance_1, Tensor mean_2, Tensor variance_2) -> (Tensor, Tensor)",
    gaussian.max_moments,
)


DROPPED_VARIANCE = composite(
    "dropped_variance(Tensor mean, Tensor variance, float weight) -> Tensor",
    lambda mean, variance, weight: variance + weight * (mean * mean + variance),
)


def dropped_variance(mean: Tensor, variance: Tensor, weight: float) -> Tensor:
    """V + weight (E^2 + V), of what dropout keeps or loses, as one operator."""
    found: Tensor = DROPPED_VARIANCE(mean, variance, weight)
    return found


def relu_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """`gaussian.relu_moments`, as one operator."""
    found: tuple[Tensor, Tensor] = RELU_MOMENTS(mean, variance)
    return found


def max_moments(
    mean_1: Tensor, variance_1: Tensor, mean_2: Tensor, variance_2: Tensor
) -> tuple[Tensor, Tensor]:
    """`gaussian.max_moments` of independent values, as one operator."""
    found: tuple[Tensor, Tensor] = MAX_MOMENTS(mean_1, variance_1, mean_2, variance_2)
    return found
