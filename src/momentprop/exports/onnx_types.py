"""Gives operands one type, as ONNX wants, without running every operator to find the few that differ.

torch's exporter promotes types by interpreting the whole graph on tensors of free sizes, which takes half of
its time. Here each operator is asked what it would promote, and only those that do are interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import traceback
from torch.utils import _pytree as pytree

from momentprop.graph.edit import fake_mode
from momentprop.graph.private import OpOverload, enable_python_dispatcher


class PromotedModule(fx.GraphModule):
    """A graph whose types are promoted: passes of the exporter over all modules have nothing to do."""

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        return iter(())


def promoted(module: fx.GraphModule) -> fx.GraphModule:
    """Add casts where operands differ in type; leave the graph alone where this torch promotes otherwise."""
    try:
        from torch.onnx._internal.fx.passes.type_promotion import (
            TypePromotionTable,
            _TypePromotionInterpreter,
        )
    except ImportError:
        return module
    nodes, table = list(module.graph.nodes), TypePromotionTable()
    values = {node: node.meta.get("val") for node in nodes}
    mode = fake_mode(list(values.values()))
    if mode is None:
        return module
    interpreter = _TypePromotionInterpreter(module, table)
    interpreter.env = values
    with mode, enable_python_dispatcher(), traceback.preserve_node_meta():
        for node in nodes:
            if _is_mixed(node, values, table):
                values[node] = interpreter.run_node(node)
    return PromotedModule(module, module.graph)


def _is_mixed(node: fx.Node, values: dict[fx.Node, Any], table: Any) -> bool:
    """Say whether operands must be cast. Whole numbers beside floating-point tensors become floats here."""
    op = node.target
    rule = table.get_rule(op.overloadpacket) if isinstance(op, OpOverload) else None
    if rule is None:
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    told = rule.preview_type_promotion(args, kwargs)
    for i, dtype in told.args_dtypes.items():
        if type(args[i]) is int and dtype.is_floating_point:
            node.update_arg(i, float(args[i]))
        elif not all(_has_type(v, dtype) for v in pytree.tree_leaves(args[i])):
            return True
    return not all(
        _has_type(v, dtype) for k, dtype in told.kwargs_dtypes.items() for v in pytree.tree_leaves(kwargs[k])
    )


def _has_type(value: Any, dtype: torch.dtype) -> bool:
    if isinstance(value, Tensor):
        return value.dtype == dtype
    return isinstance(value, float) == dtype.is_floating_point and not isinstance(value, torch.SymFloat)
