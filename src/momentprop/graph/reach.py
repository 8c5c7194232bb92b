"""Computes what a value reaches: every node that noise, or an input, has an influence on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.graph.ops import LIKE, draws
from momentprop.graph.private import HigherOrderOperator
from momentprop.graph.schema import bind

aten = torch.ops.aten

Predicate = Callable[[fx.Node], bool]
Inputs = Callable[[fx.Node], Iterable[fx.Node]]


def all_inputs(node: fx.Node) -> list[fx.Node]:
    """Return all inputs of a node."""
    return node.all_input_nodes


def values_of(node: fx.Node) -> list[fx.Node]:
    """Return the inputs whose values a node uses; others may lend it their shape or type."""
    return [n for n in node.args[:1] if isinstance(n, fx.Node)] if node.target in LIKE else all_inputs(node)


def reach(
    graph: fx.Graph,
    starts: Iterable[fx.Node] = (),
    begins: Predicate = lambda node: False,
    carries: Predicate = lambda node: True,
    brings: Inputs = all_inputs,
) -> set[fx.Node]:
    """The nodes given, those where something `begins`, and all computed from them.

    A node that does not carry on what its inputs bring is not reached: one that asks for their shape, say.
    `brings` says which inputs of a node count.
    """
    found = set(starts)
    for node in graph.nodes:
        extend(found, node, begins, carries, brings)
    return found


def extend(
    found: set[fx.Node],
    node: fx.Node,
    begins: Predicate = lambda node: False,
    carries: Predicate = lambda node: True,
    brings: Inputs = all_inputs,
) -> bool:
    """Add one node to what is reached, if it is, and say whether it is."""
    if node.op == "call_function":
        reached = begins(node) or not found.isdisjoint(brings(node))
        if reached and carries(node):
            found.add(node)
    return node in found


def upstream(last: fx.Node, belongs: Predicate) -> list[fx.Node]:
    """List what a node is computed from, itself last, as far as it belongs to something."""
    found: dict[fx.Node, None] = {}
    pending = [last]  # no recursion: chains may be long
    while pending:
        needed = [n for n in pending[-1].all_input_nodes if n not in found and belongs(n)]
        if needed:
            pending += needed
        else:
            found[pending.pop()] = None
    return list(found)


def creates_noise(node: fx.Node) -> bool:
    """Say whether a node draws random numbers: its probability is not 0, and its training flag is set."""
    op: Any = node.target
    if isinstance(op, HigherOrderOperator):
        return any(creates_noise(inner) for graph in subgraphs(node) for inner in graph.nodes)
    if not draws(op):
        return False
    arguments = bind(op, node.args, node.kwargs)
    off = any(arguments.get(name) == 0 for name in ("p", "dropout", "dropout_p"))
    return not off and all(arguments.get(name) is not False for name in ("train", "training"))


def is_lone_dropout(node: Any, op: Any = aten.dropout.default) -> bool:
    """Say whether it drops elements, one by one (or by this operator), for a single user."""
    if not isinstance(node, fx.Node) or node.target is not op or len(node.users) > 1:
        return False
    _, probability, train = node.args
    return bool(train) and isinstance(probability, float) and 0 < probability < 1


def subgraphs(node: fx.Node) -> list[fx.Graph]:
    """The graphs that a control-flow operator runs."""
    root = node.graph.owning_module
    targets = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    modules = [getattr(root, target, None) for target in targets]
    return [module.graph for module in modules if isinstance(module, fx.GraphModule)]


def is_number(value: Any) -> bool:
    """Say whether a value is a tensor of real or complex numbers, which noise can be in."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
