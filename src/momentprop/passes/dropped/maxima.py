"""Joins dropout and a maximum behind it: pooling, a maximum over dimensions, the larger of two tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import MAX_POOLS
from momentprop.graph.reach import is_lone_dropout
from momentprop.graph.schema import bind
from momentprop.passes.dropped.shift import Dropped, shifted
from momentprop.passes.runner import Pass
from momentprop.rules.families import per_dimension
from momentprop.rules.reduction import dimensions

aten = torch.ops.aten

_OVER_DIMENSIONS = (aten.amax.default, aten.amin.default)
_LARGEST_OF_TWO = (aten.maximum.default, aten.max.other, aten.fmax.default)
_LEAST_OF_TWO = (aten.minimum.default, aten.min.other, aten.fmin.default)


def join_pool(pool: fx.Node, edit: Editor) -> fx.Node | None:
    """max_pool(dropout(x)) as one operator."""
    given = bind(pool.target, pool.args, pool.kwargs)  # type: ignore[arg-type]
    n = MAX_POOLS[pool.target]
    names = ("kernel_size", "stride", "padding", "dilation")
    sizes = [given[name] or given["kernel_size"] if name == "stride" else given[name] for name in names]
    if not all(isinstance(size, int) for value in sizes for size in per_dimension(value, n)):
        return None
    found = Dropped.behind(pool.args[0])
    if found is None:
        return None
    geometry = [list(per_dimension(value, n)) for value in sizes]
    op = torch.ops.momentprop.dropped_max_pool.default
    arguments = (found.drop_probability, *geometry, given["ceil_mode"])
    return shifted(edit.op(op, found.x(edit), *arguments, value=pool.meta["val"]), found.shift, edit)


def join_over_dimensions(node: fx.Node, edit: Editor) -> fx.Node | None:
    """amax(dropout(x)) as one operator, and amin(dropout(x)) = -amax(dropout(-x))."""
    given = bind(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    value = given["self"].meta["val"]
    dims = dimensions(given["dim"], value.dim())
    if not dims or not all(isinstance(value.shape[d], int) for d in dims):
        return None
    found = Dropped.behind(given["self"])
    if found is None:
        return None
    least = node.target is aten.amin.default
    inner = edit.op(aten.neg.default, found.x(edit)) if least else found.x(edit)
    op = torch.ops.momentprop.dropped_amax.default
    out = edit.op(op, inner, found.drop_probability, dims, given["keepdim"], value=node.meta["val"])
    return shifted(edit.op(aten.neg.default, out) if least else out, found.shift, edit)


def join_two(node: fx.Node, edit: Editor) -> fx.Node | None:
    """maximum(dropout(x), dropout(y)) as a maximum over a dimension of both."""
    first: Any
    second: Any
    first, second = node.args[:2]
    if first is second or not (is_lone_dropout(first) and is_lone_dropout(second)):
        return None
    if first.args[1] != second.args[1] or _kind(first) != _kind(second):
        return None
    stacked = edit.op(aten.stack.default, [first.args[0], second.args[0]], -1)
    least = node.target in _LEAST_OF_TWO
    stacked = edit.op(aten.neg.default, stacked) if least else stacked
    op = torch.ops.momentprop.dropped_amax.default
    out = edit.op(op, stacked, first.args[1], [-1], False, value=node.meta["val"])
    return edit.op(aten.neg.default, out) if least else out


def _kind(node: fx.Node) -> Any:
    value: Tensor = node.meta["val"]
    return tuple(map(str, value.shape)), value.dtype


JOIN_DROPPED_POOL = Pass(MAX_POOLS.__contains__, join_pool)
JOIN_DROPPED_MAXIMUM = Pass(_OVER_DIMENSIONS.__contains__, join_over_dimensions)
JOIN_DROPPED_PAIR = Pass((*_LARGEST_OF_TWO, *_LEAST_OF_TWO).__contains__, join_two)
