"""Reads one of several results by an operator that returns it alone, and has a rule.

The maxima of `max(dim)` and of pooling with indices, variance and mean of `var_mean`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import ADAPTIVE_MAX_POOLS, MAX_POOLS_WITH_INDICES
from momentprop.passes.canonical.adaptive_pooling import adaptive_pool
from momentprop.passes.runner import Pass

aten = torch.ops.aten

Reader = Callable[[Editor, Any, fx.Node], fx.Node | None]  # (edit, source, getitem)


def read_result(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Compute one of several results by an operator of its own."""
    source: Any = node.args[0]
    read = _READERS.get((source.target, node.args[1])) if isinstance(source, fx.Node) else None
    return None if read is None else read(edit, source, node)


def _extreme(op: Any) -> Reader:
    def read(edit: Editor, source: Any, node: fx.Node) -> fx.Node:
        value, dim, *rest = source.args
        return edit.op(op, value, [dim], *rest, **source.kwargs)

    return read


def _same_arguments(op: Any) -> Reader:
    def read(edit: Editor, source: Any, node: fx.Node) -> fx.Node:
        return edit.op(op, *source.args, **source.kwargs)

    return read


def _adaptive_pool(op: Any) -> Reader:
    def read(edit: Editor, source: Any, node: fx.Node) -> fx.Node | None:
        return adaptive_pool(op, edit, source, node.meta["val"])

    return read


def _mean(edit: Editor, source: Any, node: fx.Node) -> fx.Node:
    value, dims = (*source.args, None)[:2]
    dims = list(range(value.meta["val"].dim())) if dims is None else dims
    return edit.op(aten.mean.dim, value, dims, bool(source.kwargs.get("keepdim", False)))


_READERS: dict[tuple[Any, Any], Reader] = {
    (aten.max.dim, 0): _extreme(aten.amax.default),
    (aten.min.dim, 0): _extreme(aten.amin.default),
    (aten.var_mean.correction, 0): _same_arguments(aten.var.correction),
    (aten.var_mean.correction, 1): _mean,
    **{(op, 0): _same_arguments(plain) for op, plain in MAX_POOLS_WITH_INDICES.items()},
    **{(op, 0): _adaptive_pool(plain) for op, plain in ADAPTIVE_MAX_POOLS.items()},
}
READ_RESULT = Pass((operator.getitem,).__contains__, read_result)
