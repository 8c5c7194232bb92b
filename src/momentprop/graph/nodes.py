"""A new node in a traced graph, with the value (a fake tensor) and the place that traced nodes have."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from momentprop.graph.private import FakeTensor

aten = torch.ops.aten

_PLACE = ("nn_module_stack", "stack_trace", "torch_fn", "from_node", "source_fn_stack")


def emit(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], place: fx.Node, kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """Call `target` at the point of insertion; messages about it name the place of the node `place`."""
    node = graph.call_function(target, args, kwargs or {})
    node.meta = {key: place.meta[key] for key in _PLACE if key in place.meta}
    node.meta["val"] = fake_value(node)
    return node


def repeated(graph: fx.Graph, value: fx.Node, times: int, dim: int, place: fx.Node) -> fx.Node:
    """Every element so many times in a row along a dimension, counted from the last one.

    `repeat_interleave` would ask its input for its sizes, and the batch would be one of them from then on.
    """
    n = value.meta["val"].dim()
    at = n + dim + 1
    value = emit(graph, aten.unsqueeze.default, (value, at), place)
    sizes = [times if d == at else -1 for d in range(n + 1)]
    value = emit(graph, aten.expand.default, (value, sizes), place)
    return emit(graph, aten.flatten.using_ints, (value, at - 1, at), place)


def fake_value(node: fx.Node) -> Any:
    """What the node computes, as a fake tensor of the right shape, strides and dtype."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    mode = _mode(node)
    target: Any = node.target
    if mode is None:
        return None
    with mode, torch.no_grad():
        return target(*args, **kwargs)


def _mode(node: fx.Node) -> Any:
    """The fake mode of the graph: of an argument, or else of any value in it."""
    for other in (*node.all_input_nodes, *node.graph.nodes):
        for value in pytree.tree_leaves(other.meta.get("val")):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return None


def remove_unused(graph: fx.Graph) -> None:
    """Remove what no output depends on, also where it draws random numbers; the graph is functional."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
