"""Layers with random weights in a graph -> one operator each, that has a rule.

`F.linear(x, F.dropout(W))` (DropConnect), `F.linear(x, mu + sigma * torch.randn_like(mu))`, the same with a
convolution: noise of a weight has no batch dimension, so it belongs to no sample, and the covariance of
one sample's outputs has no place for it. Together with the layer it has: seen from one sample, the layer is
linear with noise of its own (rules/random_weights.py).

Moments of the weights are computed by the rules, traced into the graph as plain operators. The elements of a
weight have to be independent: drawn one by one, and changed element by element. Where several layers, or
several steps of a recurrent one, use the same random weights, the diagonal tiers take them as drawn anew for
each; tier `accurate` keeps them in the graph as they are (per_sample.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from momentprop.capture.draws import DRAWS
from momentprop.capture.trace import Trace
from momentprop.graph.edit import emit, remove_unused
from momentprop.graph.private import OpOverload
from momentprop.graph.reach import creates_noise
from momentprop.graph.schema import bind
from momentprop.moments import Moments, is_moments
from momentprop.rules.convolution import CONVOLUTIONS
from momentprop.rules.families import per_dimension
from momentprop.rules.registry import Lookup

aten = torch.ops.aten

_PRODUCTS = (aten.matmul.default, aten.mm.default)
_MOVES = (
    aten.t.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.clone.default,
    aten.contiguous.default,
    aten.to.dtype,
)


def fold_random_weights(trace: Trace, rules: Lookup) -> Trace:
    """The trace with such layers replaced; itself where there are none."""
    noisy, dependent = _reached(trace)
    if not any(_weights(node, noisy - dependent) for node in trace.graph.nodes):
        return trace
    copy = dataclasses.replace(trace, graph=trace.copy_graph())
    noisy, dependent = _reached(copy)
    alone = noisy - dependent
    for node in list(copy.graph.nodes):
        found = _weights(node, alone)
        if found and all(_is_independent(n, noisy, rules) for n in found):
            with copy.graph.inserting_before(node):
                _fold(copy.graph, node, alone, rules)
    remove_unused(copy.graph)
    copy.graph.lint()
    return copy


def _reached(trace: Trace) -> tuple[set[fx.Node], set[fx.Node]]:
    """What noise reaches, and what depends on the inputs' values or number."""
    noisy: set[fx.Node] = set()
    dependent = set(trace.input_nodes)
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        if creates_noise(node) or any(n in noisy for n in node.all_input_nodes):
            noisy.add(node)
        if any(n in dependent for n in node.all_input_nodes):
            dependent.add(node)
    return noisy, dependent


def _arguments(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """Input, weight and bias of a layer."""
    args: Any = node.args
    if node.target in _PRODUCTS:
        is_matrix = isinstance(args[1], fx.Node) and args[1].meta["val"].dim() == 2
        return (*args, None) if is_matrix else None
    if node.target is aten.addmm.default:
        return (args[1], args[2], args[0]) if not node.kwargs else None
    if node.target is aten.linear.default or (node.target in CONVOLUTIONS and node.meta["val"].dim() < 5):
        bound = bind(node.target, node.args, node.kwargs)
        return bound["input"], bound["weight"], bound["bias"]
    return None


def _weights(node: fx.Node, alone: set[fx.Node]) -> list[fx.Node]:
    """The random ones among weight and bias of a layer, where they depend on no input."""
    arguments = _arguments(node) if node.op == "call_function" else None
    return [] if arguments is None else [n for n in arguments[1:] if n in alone]


def _is_independent(weight: fx.Node, noisy: set[fx.Node], rules: Lookup) -> bool:
    """Whether elements of the weight are independent, and all noise in it is its own."""
    size = weight.meta["val"].numel()
    for node in _chain(weight, noisy):
        op, draw = node.target, DRAWS.get(node.target)
        if not isinstance(op, OpOverload) or node.meta["val"].numel() != size:
            return False
        if len(node.users) > 1 and (node is not weight or rules.linear):
            return False
        if draw is not None and draw.per_channel:
            return False
        if draw is None and torch.Tag.pointwise not in op.tags and op not in _MOVES:
            return False
        if rules.find(op) is None and op not in _MOVES:
            return False
    return True


def _chain(weight: fx.Node, noisy: set[fx.Node]) -> list[fx.Node]:
    """The random nodes that make up the weight, in order."""
    found: list[fx.Node] = []

    def visit(node: fx.Node) -> None:
        if node in noisy and node not in found:
            for used in node.all_input_nodes:
                visit(used)
            found.append(node)

    visit(weight)
    return found


def _moments(graph: fx.Graph, weight: Any, alone: set[fx.Node], rules: Lookup, transpose: bool) -> list[Any]:
    """Nodes for mean and variance of a weight."""
    if weight not in alone:
        mean = emit(graph, aten.t.default, (weight,), weight) if transpose and weight is not None else weight
        return [mean, None]
    chain = _chain(weight, alone)
    given = list(dict.fromkeys(n for node in chain for n in node.all_input_nodes if n not in chain))

    def run(*values: Any) -> list[Any]:
        env: dict[fx.Node, Any] = dict(zip(given, values, strict=True))
        args: Any
        kwargs: Any
        for node in chain:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            target: Any = rules.find(node.target) or node.target
            if node.target in _MOVES and is_moments(args[0]):
                x, op = args[0], node.target
                env[node] = Moments(op(x.mean, *args[1:], **kwargs), op(x.variance, *args[1:], **kwargs))
            else:
                env[node] = target(*args, **kwargs)
        out = env[weight]
        found = [out.mean, out.variance] if is_moments(out) else [out, torch.zeros_like(out)]
        return [v.t() for v in found] if transpose else found

    examples = [n.meta["val"] for n in given]
    mode = next(v.fake_mode for v in (*examples, weight.meta["val"]) if hasattr(v, "fake_mode"))
    with mode, torch.no_grad():
        traced = make_fx(run)(*examples).graph
    placeholders = [n for n in traced.nodes if n.op == "placeholder"]
    mapping = dict(zip(placeholders, given, strict=True))
    output: Any = graph.graph_copy(traced, mapping)
    for copied in mapping.values():
        for key in ("nn_module_stack", "stack_trace"):
            if key in weight.meta:
                copied.meta.setdefault(key, weight.meta[key])
    return list(output)


def _fold(graph: fx.Graph, node: fx.Node, alone: set[fx.Node], rules: Lookup) -> None:
    arguments = _arguments(node)
    assert arguments is not None
    x, weight, bias = arguments
    batch = _batch_dimension(x)
    if rules.linear and batch is None:
        return
    is_product = node.target in _PRODUCTS or node.target is aten.addmm.default
    moments = _moments(graph, weight, alone, rules, is_product)
    moments += _moments(graph, bias, alone, rules, False)
    if node.target in CONVOLUTIONS:
        sizes = _sizes(node)
        if sizes is None:
            return
        op: Any = torch.ops.momentprop.random_convolution.default
        out = emit(graph, op, (x, *moments, *sizes), node)
    else:
        if batch:
            x = emit(graph, aten.transpose.int, (x, 0, batch), node)
        out = emit(graph, torch.ops.momentprop.random_linear.default, (x, *moments), node)
        if batch:
            out = emit(graph, aten.transpose.int, (out, 0, batch), node)
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def _batch_dimension(x: fx.Node) -> int | None:
    """The one dimension of variable size, if it is that of the batch alone."""
    value = x.meta["val"]
    found = [d for d, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
    if len(found) != 1 or not value.shape[found[0]].node.expr.is_symbol:
        return None
    return found[0] if found[0] < value.dim() - 1 else None


def _sizes(node: fx.Node) -> tuple[Any, ...] | None:
    """Stride, padding, dilation and groups of a convolution; None where it pads one side more."""
    bound = bind(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    kernel = list(bound["weight"].meta["val"].shape[2:])
    n = len(kernel)
    stride, dilation = per_dimension(bound["stride"], n), per_dimension(bound["dilation"], n)
    padding = bound["padding"]
    if padding == "valid":
        padding = 0
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(t % 2 for t in total):
            return None
        padding = [t // 2 for t in total]
    return stride, per_dimension(padding, n), dilation, bound["groups"]
