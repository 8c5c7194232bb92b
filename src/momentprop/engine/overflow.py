"""Runs a program again in float64 where float32 is too narrow: squares above 1e38 do not exist there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from momentprop.graph.private import FakeTensor, in_dispatch_mode, is_transformed
from momentprop.moments import is_moments

_FAR = 1e9  # fourth powers of larger numbers do not exist in float32


def overflows(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Say whether float32 is too narrow; asked on the CPU alone, where that waits for nothing."""
    if torch.compiler.is_compiling() or in_dispatch_mode():
        return False
    given = [v for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor) and v.is_floating_point()]
    found = [v for m in outputs if is_moments(m) for v in (m.mean, m.variance)]
    if not all(map(_has_values, (*given, *found))):
        return False
    return not all(float(v.detach().abs().sum()) < torch.inf for v in found) or any(map(_is_far, given))


def _has_values(tensor: Tensor) -> bool:
    is_real = not isinstance(tensor, FakeTensor) and not is_transformed(tensor)
    return is_real and tensor.device.type == "cpu" and tensor.dtype != torch.float64


def _is_far(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and float(torch.linalg.vector_norm(tensor.detach(), torch.inf)) > _FAR


def in_float64(program: nn.Module, values: Sequence[Any], outputs: list[Any]) -> list[Any]:
    """The outputs by way of float64. What float32 cannot hold comes back as its largest number."""

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def back(value: Any, like: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        most = torch.finfo(like.dtype).max
        return torch.where(value.isinf(), value, value.clamp(-most, most)).to(like.dtype)

    try:
        return pytree.tree_map(back, program(*pytree.tree_map(double, list(values))), outputs)
    except RuntimeError:  # types that the model's author wrote do not mix with float64
        return outputs
