"""Transposed maps of the operators that move values and that networks use most.

They keep shapes, not values: what the sweep back does not need shall not wait for it in memory.

The others are transposed by the positions of their elements (`families.by_position`), which is as right but
slower: a scatter instead of a view, a slice or a padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from momentprop.moments import Moments, is_moments
from momentprop.rules.linearization import Pull, gathered

Cotangents = list[Tensor | None]


def permuted(out: Moments, x: Moments, dims: list[int]) -> Pull:
    n = x.mean.dim()
    inverse = sorted(range(n), key=lambda d: dims[d] % n)
    return lambda cotangent: [cotangent.permute(0, *[1 + d for d in inverse])]


def swapped(out: Moments, x: Moments, dim0: int = 0, dim1: int = 1) -> Pull:
    n = x.mean.dim()
    if n < 2:
        return lambda cotangent: [cotangent]
    return lambda cotangent: [cotangent.transpose(1 + dim0 % n, 1 + dim1 % n)]


def expanded(out: Moments, x: Any, *_: Any, **__: Any) -> Pull:
    shape = x.shape
    return lambda cotangent: [gathered(cotangent, shape)]


def sliced(out: Moments, x: Moments, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Pull:
    n, size = x.mean.dim(), x.shape[dim]
    first = 0 if start is None else max(start + size, 0) if start < 0 else min(start, size)

    def pull(cotangent: Tensor) -> list[Tensor]:
        values = cotangent.movedim(1 + dim % n, -1)
        if step != 1:  # zeros between the elements
            values = F.pad(values[..., None], (0, step - 1)).flatten(-2)
        return [F.pad(values, (first, size - first - values.shape[-1])).movedim(-1, 1 + dim % n)]

    return pull


def narrowed(out: Moments, x: Moments, dim: int, start: int, length: int) -> Pull:
    return sliced(out, x, dim, start)


def selected(out: Moments, x: Moments, dim: int, index: int) -> Pull:
    inner, axis = sliced(out, x, dim, index % x.shape[dim]), 1 + dim % x.mean.dim()
    return lambda cotangent: inner(cotangent.unsqueeze(axis))


def joined(out: Moments, tensors: list[Any], dim: int = 0) -> Pull:
    axis = dim % out.mean.dim()
    # an empty tensor of one dimension may be joined to anything
    sizes = [t.shape[axis] if len(t.shape) == out.mean.dim() else 0 for t in tensors]
    random = [is_moments(t) for t in tensors]

    def pull(cotangent: Tensor) -> list[Tensor]:
        parts = cotangent.split(sizes, 1 + axis)
        return [part for part, is_random in zip(parts, random, strict=True) if is_random]

    return pull


def stacked(out: Moments, tensors: list[Any], dim: int = 0) -> Pull:
    axis, random = 1 + dim % out.mean.dim(), [is_moments(t) for t in tensors]

    def pull(cotangent: Tensor) -> list[Tensor]:
        parts = cotangent.unbind(axis)
        return [part for part, is_random in zip(parts, random, strict=True) if is_random]

    return pull


def _filled(cotangents: Cotangents, shapes: list[torch.Size]) -> list[Tensor]:
    """Zeros for the parts nothing depends on."""
    rows = next(c for c in cotangents if c is not None)
    return [
        rows.new_zeros(rows.shape[0], *shape) if c is None else c
        for c, shape in zip(cotangents, shapes, strict=True)
    ]


def cut(out: list[Moments], x: Moments, sizes: Any, dim: int = 0) -> Pull:
    """split and chunk."""
    axis, shapes = 1 + dim % x.mean.dim(), [part.shape for part in out]
    return lambda cotangents: [torch.cat(_filled(cotangents, shapes), axis)]


def unbound(out: list[Moments], x: Moments, dim: int = 0) -> Pull:
    axis, shapes = 1 + dim % x.mean.dim(), [part.shape for part in out]
    return lambda cotangents: [torch.stack(_filled(cotangents, shapes), axis)]


def cast(out: Moments, x: Any, *_: Any, **__: Any) -> Pull:
    dtype, device = x.dtype, x.device
    return lambda cotangent: [cotangent.to(device=device, dtype=dtype)]
