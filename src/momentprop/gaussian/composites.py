"""Moments as operators of PyTorch: of ReLU, of the maximum of two, of max pooling (rules/max_pooling.py).

Exporters then see one node where there are thirty, and can write it in the way that suits their runtime
(exports/onnx_moments.py). Everything else sees through them: they are composite, so autograd, compilers and
`torch.func` work on what they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian import normal as gaussian
from momentprop.graph.private import OpOverload, in_dispatch_mode

_LIBRARY = torch.library.Library("momentprop", "DEF")


_BLOCK = 2**18  # elements: few enough for a cache, and enough not to feel the calls


def composite(schema: str, function: Callable[..., Any]) -> OpOverload:
    """The function, of tensors with the same batch, as an operator of this schema."""
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, _in_blocks(function), "CompositeImplicitAutograd")
    _LIBRARY.impl(name, function, "FuncTorchBatchedDecomposition")  # for torch.vmap
    op: OpOverload = getattr(torch.ops.momentprop, name).default
    return op


def _in_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on a part of the batch at a time, where every operator in it writes memory."""

    def run(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if not is_eager(tensors) or not _has_blocks(tensors):
            return function(*args)
        rows = len(tensors[0])
        step = max(1, rows * _BLOCK // tensors[0].numel())
        blocks = [
            function(*[arg[i : i + step] if isinstance(arg, Tensor) else arg for arg in args])
            for i in range(0, rows, step)
        ]
        if isinstance(blocks[0], Tensor):
            return torch.cat(blocks)
        return tuple(map(torch.cat, zip(*blocks, strict=True)))

    return run


def is_eager(tensors: Sequence[Tensor]) -> bool:
    """Say whether operators run at once and nothing remembers them: no derivatives, no tracing."""
    if in_dispatch_mode() or any(type(tensor) is not Tensor for tensor in tensors):
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def _has_blocks(tensors: Sequence[Tensor]) -> bool:
    return tensors[0].numel() > 2 * _BLOCK and all(
        tensor.dim() > 1 and len(tensor) == len(tensors[0]) for tensor in tensors
    )


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
