"""Recognises RMS norm written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import SUMS
from momentprop.passes.runner import Pass

aten = torch.ops.aten


def recognise_rms_norm(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Recognise x * rsqrt(mean(x^2) + eps) and x / sqrt(mean(x^2) + eps) over one dimension.

    Rules of the parts would take the factors for independent, which are functions of the same values.
    """
    x, factor = node.args[:2]
    inverse = node.target is aten.mul.Tensor
    for value, scale in ((x, factor), (factor, x)) if inverse else ((x, factor),):
        found = _mean_square(scale, inverse)
        if found is None or not isinstance(value, fx.Node) or found[0] is not value:
            continue
        _, dim, eps = found
        size, n = value.meta["val"].shape[dim], value.meta["val"].dim()
        if not isinstance(size, int):
            return None
        last = dim % n == n - 1
        moved = value if last else edit.op(aten.transpose.int, value, dim, -1)
        normed = edit.op(aten.rms_norm.default, moved, [size], None, eps)
        return normed if last else edit.op(aten.transpose.int, normed, dim, -1)
    return None


def _mean_square(node: Any, inverse: bool) -> tuple[Any, int, float] | None:
    """Return (x, dim, eps) of rsqrt(mean(x^2, dim, keepdim) + eps), or of the square root."""
    if not isinstance(node, fx.Node):
        return None
    op, power = (aten.rsqrt.default, -0.5) if inverse else (aten.sqrt.default, 0.5)
    if node.target is not op and not _is_power(node, power):
        return None
    inner: Any = node.args[0]
    if inner.target not in SUMS or inner.kwargs:
        return None
    mean, eps = inner.args[:2]
    if isinstance(eps, fx.Node):
        mean, eps = eps, mean
    if not isinstance(mean, fx.Node) or not isinstance(eps, (int, float)) or mean.target is not aten.mean.dim:
        return None
    square: Any
    dims: Any
    square, dims, keepdim = (*mean.args, None, False)[:3]
    if not keepdim or not isinstance(dims, (list, tuple)) or len(dims) != 1 or mean.kwargs:
        return None
    if not _is_square(square):
        return None
    return square.args[0], dims[0], float(eps)


def _is_square(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    itself = node.target is aten.mul.Tensor and node.args[0] is node.args[1]
    return itself or node.target is aten.square.default or _is_power(node, 2)


def _is_power(node: fx.Node, exponent: float) -> bool:
    return node.target is aten.pow.Tensor_Scalar and bool(node.args[1] == exponent)


RECOGNISE_RMS_NORM = Pass((aten.mul.Tensor, aten.div.Tensor).__contains__, recognise_rms_norm)
