"""An operator without a rule -> operators that have one, by PyTorch's own decompositions.

Only operators that need it are decomposed: decomposing a whole graph erases or rewrites its dropouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from momentprop.coverage import analyze, creates_noise

_DEPTH = 8  # decompositions within decompositions


def decompose(graph: fx.Graph, nodes: list[fx.Node], fidelity: str) -> None:
    """Replace each node by its decomposition where that is covered by rules; leave the others alone."""
    for node in nodes:
        expansion = _expand(node, fidelity, _DEPTH)
        if expansion is not None:
            _inline(graph, node, expansion)


def _expand(node: fx.Node, fidelity: str, depth: int) -> fx.Graph | None:
    """A graph that computes the node from its tensor inputs and whose every operator has a rule."""
    function = _decomposition(node.target)
    if function is None or creates_noise(node) or depth == 0:
        return None
    values = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    leaves, spec = pytree.tree_flatten(values)
    tensors = [v for v in leaves if isinstance(v, Tensor)]
    mode = next((t.fake_mode for t in tensors if hasattr(t, "fake_mode")), None)
    if mode is None or any(
        v is None and isinstance(a, fx.Node) for v, a in zip(leaves, _leaves(node), strict=True)
    ):
        return None

    def run(*given: Tensor) -> Any:
        rest = iter(given)
        filled = [next(rest) if isinstance(v, Tensor) else v for v in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return function(*args, **kwargs)

    try:
        with mode, torch.no_grad():
            graph = make_fx(run, pre_dispatch=True)(*tensors).graph
    except Exception:
        return None  # stays uncovered, and is reported as such
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for inner, reason in analyze(graph, fidelity, placeholders).missing.items():
        deeper = _expand(inner, fidelity, depth - 1) if reason == "has no rule" else None
        if deeper is None or inner.target is node.target:
            return None
        _inline(graph, inner, deeper)
    return graph


def _decomposition(op: Any) -> Callable[..., Any] | None:
    if not isinstance(op, OpOverload):
        return None
    if op._can_decompose():
        return op.decompose
    return core_aten_decompositions().get(op)


def _leaves(node: fx.Node) -> list[Any]:
    return pytree.tree_leaves((node.args, node.kwargs))


def _inline(graph: fx.Graph, node: fx.Node, expansion: fx.Graph) -> None:
    """Put the expansion in place of the node, which keeps its name for messages."""
    tensors = [a for a in _leaves(node) if isinstance(a, fx.Node) and isinstance(a.meta.get("val"), Tensor)]
    placeholders = [n for n in expansion.nodes if n.op == "placeholder"]
    mapping = dict(zip(placeholders, tensors, strict=True))
    output: Any
    with graph.inserting_before(node):
        output = graph.graph_copy(expansion, mapping)
    for copied in mapping.values():
        for key in ("nn_module_stack", "stack_trace"):
            if key in node.meta:
                copied.meta.setdefault(key, node.meta[key])
    if isinstance(output, fx.Node):
        node.replace_all_uses_with(output)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(output[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
