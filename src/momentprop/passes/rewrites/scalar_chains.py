"""Folds additions of numbers and multiplications by numbers into at most one of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import DIFFERENCES, PRODUCTS, QUOTIENTS, SUMS
from momentprop.graph.schema import bind
from momentprop.passes.runner import Pass

aten = torch.ops.aten

_AFFINE: dict[Any, Callable[[float, float], tuple[float, float]]] = {
    **dict.fromkeys(SUMS, lambda c, alpha: (1.0, c * alpha)),
    **dict.fromkeys(DIFFERENCES, lambda c, alpha: (1.0, -c * alpha)),
    **dict.fromkeys(PRODUCTS, lambda c, alpha: (c, 0.0)),
    **dict.fromkeys(QUOTIENTS, lambda c, alpha: (1 / c, 0.0)),
    aten.rsub.Scalar: lambda c, alpha: (-alpha, c),
}


def fold_scalar_chains(last: fx.Node, edit: Editor) -> fx.Node | None:
    """Operators x -> a x + b with numbers a, b compose to one: c (a x + b) + d = (c a) x + (c b + d)."""
    if any(_affine(user) is not None for user in last.users):
        return None  # part of a longer chain
    length, scale, shift = 0, 1.0, 0.0
    x: Any = last
    while isinstance(x, fx.Node) and (numbers := _affine(x)) is not None:
        if length and len(x.users) > 1:
            break
        a, b = numbers
        scale, shift = scale * a, shift + scale * b
        length, x = length + 1, x.args[0]
    if length <= max((scale != 1) + (shift != 0), 1):
        return None  # nothing to gain
    value = last.meta["val"]
    if scale != 1:
        x = edit.op(aten.mul.Tensor, x, scale, value=value)
    if shift != 0:
        x = edit.op(aten.add.Tensor, x, shift, value=value)
    return x


def _affine(node: fx.Node) -> tuple[float, float] | None:
    """(a, b) of a floating-point x -> a x + b with plain numbers."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point() or not node.args:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or getattr(source.meta.get("val"), "dtype", None) != value.dtype:
        return None
    if node.target is aten.neg.default:
        return -1.0, 0.0
    make = _AFFINE.get(node.target)
    if make is None or not isinstance(node.args[1], (int, float)) or isinstance(node.args[1], bool):
        return None
    if node.args[1] == 0 and node.target in QUOTIENTS:
        return None
    alpha = bind(node.target, node.args, node.kwargs).get("alpha", 1)  # type: ignore[arg-type]
    return make(node.args[1], alpha)


FOLD_SCALAR_CHAINS = Pass({*_AFFINE, aten.neg.default}.__contains__, fold_scalar_chains)
