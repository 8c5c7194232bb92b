"""Joins dropout and a maximum behind it: pooling, a maximum over dimensions, the larger of two tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import MAX_POOLS, MOVES, is_pointwise
from momentprop.graph.reach import is_lone_dropout
from momentprop.graph.schema import bind
from momentprop.passes.runner import Pass
from momentprop.rules.families import per_dimension
from momentprop.rules.reduction import dimensions

aten = torch.ops.aten

_OVER_DIMENSIONS = (aten.amax.default, aten.amin.default)
_LARGEST_OF_TWO = (aten.maximum.default, aten.max.other, aten.fmax.default)
_LEAST_OF_TWO = (aten.minimum.default, aten.min.other, aten.fmin.default)


@dataclass(frozen=True)
class _Dropped:
    """Says that a value is dropout(x) + shift."""

    x: fx.Node
    drop_probability: float
    shift: float = 0.0


def join_pool(pool: fx.Node, edit: Editor) -> fx.Node | None:
    """max_pool(dropout(x)) as one operator."""
    given = bind(pool.target, pool.args, pool.kwargs)  # type: ignore[arg-type]
    n = MAX_POOLS[pool.target]
    names = ("kernel_size", "stride", "padding", "dilation")
    sizes = [given[name] or given["kernel_size"] if name == "stride" else given[name] for name in names]
    if not all(isinstance(size, int) for value in sizes for size in per_dimension(value, n)):
        return None
    found = _dropped(pool.args[0], edit)
    if found is None:
        return None
    geometry = [list(per_dimension(value, n)) for value in sizes]
    op = torch.ops.momentprop.dropped_max_pool.default
    arguments = (found.drop_probability, *geometry, given["ceil_mode"])
    return _shifted(edit.op(op, found.x, *arguments, value=pool.meta["val"]), found.shift, edit)


def join_over_dimensions(node: fx.Node, edit: Editor) -> fx.Node | None:
    """amax(dropout(x)) as one operator, and amin(dropout(x)) = -amax(dropout(-x))."""
    given = bind(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    value = given["self"].meta["val"]
    dims = dimensions(given["dim"], value.dim())
    if not dims or not all(isinstance(value.shape[d], int) for d in dims):
        return None
    found = _dropped(given["self"], edit)
    if found is None:
        return None
    least = node.target is aten.amin.default
    inner = edit.op(aten.neg.default, found.x) if least else found.x
    op = torch.ops.momentprop.dropped_amax.default
    out = edit.op(op, inner, found.drop_probability, dims, given["keepdim"], value=node.meta["val"])
    return _shifted(edit.op(aten.neg.default, out) if least else out, found.shift, edit)


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


def _dropped(value: Any, edit: Editor) -> _Dropped | None:
    """Find the dropout that a value comes from, by functions of an element and by moves of elements.

    f(dropout(x)) = f(0) + dropout(q (f(x / q) - f(0))) for any function f of an element.
    """
    chain: list[fx.Node] = []
    while (
        isinstance(value, fx.Node)
        and len(value.users) == 1
        and (value.target in MOVES or _is_function(value))
    ):
        chain.insert(0, value)
        value = value.args[0]
    if not is_lone_dropout(value):
        return None
    x, p = value.args[:2]
    functions = [f for f in chain if f.target not in MOVES]
    rescaled = any(f.target is not aten.relu.default for f in functions)
    shift = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for f in functions:
            shift = f.target(shift, *f.args[1:], **f.kwargs)  # type: ignore[operator]
    if rescaled:
        x = edit.op(aten.mul.Tensor, x, 1 / (1 - p))
    for f in chain:
        x = edit.op(f.target, x, *f.args[1:], place=f, **f.kwargs)
    if rescaled:
        x = edit.op(aten.mul.Tensor, _shifted(x, -shift.item(), edit), 1 - p)
    return _Dropped(x, p, shift.item())


def _is_function(node: fx.Node) -> bool:
    """Say whether it works element by element on one value, and on nothing else but numbers."""
    return (
        is_pointwise(node.target)
        and node.all_input_nodes == [node.args[0]]
        and _kind(node)[1].is_floating_point
    )


def _shifted(x: fx.Node, shift: float, edit: Editor) -> fx.Node:
    return edit.op(aten.add.Tensor, x, shift, value=x.meta["val"]) if shift else x


def _kind(node: fx.Node) -> Any:
    value: Tensor = node.meta["val"]
    return tuple(map(str, value.shape)), value.dtype


JOIN_DROPPED_POOL = Pass(MAX_POOLS.__contains__, join_pool)
JOIN_DROPPED_MAXIMUM = Pass(_OVER_DIMENSIONS.__contains__, join_over_dimensions)
JOIN_DROPPED_PAIR = Pass((*_LARGEST_OF_TWO, *_LEAST_OF_TWO).__contains__, join_two)
