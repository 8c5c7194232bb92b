"""Upsampling with linear and cubic interpolation: one small matrix per spatial dimension.

y = A_1 A_2 ... x, each A along one dimension: mean A E, variance (A*A) V; the transposed map is A^T. Elements
of the output share inputs, which the backward sweep sees, and the diagonal does not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments
from momentprop.rules.linearization import Propagated, mapped
from momentprop.rules.registry import EXACT_IF_UNCORRELATED, rule

aten = torch.ops.aten


def _matrices(op: Any, x: Tensor, n: int, size: Any, *given: Any) -> list[Tensor]:
    """The matrices [out, in] of the n last dimensions, read off the operator itself.

    Interpolation is separable: what is constant along all dimensions but one shows that one's matrix.
    """
    scales = [s for s in given[-1] or [] if s] if size is None else []
    others = max([1, *[math.ceil(1 / s) for s in scales]])  # enough for one element to be left
    found = []
    for d in range(n):
        length = x.shape[d - n]
        shape = [others] * n
        shape[d] = length
        unit = torch.eye(length, dtype=x.dtype, device=x.device)
        unit = unit.reshape(1, length, *[length if i == d else 1 for i in range(n)])
        rows = op(unit.expand(1, length, *shape), size, *given)[0].movedim(1 + d, 1)
        found.append(rows.flatten(2).select(2, 0).T if n > 1 else rows.T)
    return found


def _along(value: Tensor, matrices: list[Tensor]) -> Tensor:
    """Each matrix applied along its dimension, the last ones of the value."""
    n = len(matrices)
    for d, matrix in enumerate(matrices):
        value = torch.matmul(value.movedim(d - n, -1), matrix.T).movedim(-1, d - n)
    return value


def _interpolation(n: int, *ops: Any) -> None:
    def make(op: Any) -> None:
        @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear")
        def propagate(x: Moments, *given: Any) -> Propagated:
            matrices = _matrices(op, x.mean, n, *given)
            variance = _along(x.variance, [m * m for m in matrices])
            return Propagated(
                Moments(op(x.mean, *given), variance),
                lambda: mapped(lambda cotangent: [_along(cotangent, [m.T for m in matrices])]),
            )

    for op in ops:
        make(op)


_interpolation(1, aten.upsample_linear1d.default, aten.upsample_linear1d.vec)
_interpolation(
    2,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_bicubic2d.default,
    aten.upsample_bicubic2d.vec,
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bilinear2d_aa.vec,
    aten._upsample_bicubic2d_aa.default,
    aten._upsample_bicubic2d_aa.vec,
)
_interpolation(3, aten.upsample_trilinear3d.default, aten.upsample_trilinear3d.vec)
