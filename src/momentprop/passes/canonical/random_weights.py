"""Turns each layer with random weights in a graph into one operator that has a rule.

`F.linear(x, F.dropout(W))` (DropConnect), `F.linear(x, mu + sigma * torch.randn_like(mu))`, the same with a
convolution: noise of a weight has no batch dimension, so it belongs to no sample, and the covariance of
one sample's outputs cannot express it. Combined with its layer it can: seen from one sample, the layer is
linear with noise of its own (rules/random_weights.py).

Moments of the weights are computed by the rules, traced into the graph as plain operators. The elements of a
weight have to be independent: drawn one by one, and changed element by element. Where several layers, or
several steps of a recurrent one, use the same random weights, the diagonal tiers take them as drawn anew for
each; tier `accurate` keeps them in the graph as they are (engine/per_sample.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from momentprop.capture.draws import DRAWS
from momentprop.graph.edit import Editor, extracted, fake_mode
from momentprop.graph.ops import CONVOLUTIONS, MATRIX_PRODUCTS, MOVES
from momentprop.graph.private import OpOverload
from momentprop.graph.reach import creates_noise, reach, upstream
from momentprop.graph.schema import bind
from momentprop.moments import is_moments
from momentprop.passes.runner import Pass
from momentprop.rules.convolution import borders
from momentprop.rules.families import per_dimension
from momentprop.rules.registry import Lookup

aten = torch.ops.aten

_MOVES = (*MOVES, aten.to.dtype)


def fold_random_weights(graph: fx.Graph, inputs: Sequence[fx.Node], rules: Lookup) -> Pass:
    """Make the pass for a graph: which of its weights are random follows from what depends on its inputs."""
    noisy = reach(graph, begins=creates_noise)
    alone = noisy - reach(graph, inputs)

    def fold_random_weights(node: fx.Node, edit: Editor) -> fx.Node | None:
        found = _weights(node, alone)
        if not found or not all(_is_independent(n, noisy, rules) for n in found):
            return None
        return _fold(node, edit, alone, rules)

    return Pass(_is_layer if alone else lambda op: False, fold_random_weights, exact=False)


def _is_layer(op: Any) -> bool:
    layers = (*MATRIX_PRODUCTS, *CONVOLUTIONS, aten.addmm.default, aten.linear.default)
    return op in layers


def _arguments(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """Input, weight and bias of a layer."""
    args: Any = node.args
    if node.target in MATRIX_PRODUCTS:
        is_matrix = isinstance(args[1], fx.Node) and args[1].meta["val"].dim() == 2
        return (*args, None) if is_matrix else None
    if node.target is aten.addmm.default:
        return (args[1], args[2], args[0]) if not node.kwargs else None
    if node.target is aten.linear.default or (node.target in CONVOLUTIONS and node.meta["val"].dim() < 5):
        bound = bind(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        return bound["input"], bound["weight"], bound["bias"]
    return None


def _weights(node: fx.Node, alone: set[fx.Node]) -> list[fx.Node]:
    """The random ones among weight and bias of a layer, where they depend on no input."""
    arguments = _arguments(node)
    return [] if arguments is None else [n for n in arguments[1:] if n in alone]


def _is_independent(weight: fx.Node, noisy: set[fx.Node], rules: Lookup) -> bool:
    """Say whether elements of the weight are independent, and all noise in it is its own."""
    size = weight.meta["val"].numel()
    for node in upstream(weight, noisy.__contains__):
        op, draw = node.target, DRAWS.get(node.target)
        if not isinstance(op, OpOverload) or node.meta["val"].numel() != size:
            return False
        if len(node.users) > 1 and (node is not weight or rules.linear):
            return False
        if draw is not None and draw.per_channel:
            return False
        if draw is None and torch.Tag.pointwise not in op.tags and op not in _MOVES:
            return False
        if rules.find(op) is None:
            return False
    return True


def _moments(edit: Editor, weight: Any, alone: set[fx.Node], rules: Lookup, transpose: bool) -> list[Any]:
    """Nodes for mean and variance of a weight."""
    if weight not in alone:
        return [edit.op(aten.t.default, weight) if transpose and weight is not None else weight, None]
    inner, given = extracted(upstream(weight, alone.__contains__))
    for node in inner.nodes:
        node.target = rules.find(node.target) or node.target
    by_rules = fx.GraphModule(torch.nn.Module(), inner, "Weight")

    def run(*values: Any) -> list[Any]:
        out = by_rules(*values)
        found = [out.mean, out.variance] if is_moments(out) else [out, torch.zeros_like(out)]
        return [v.t() for v in found] if transpose else found

    examples = [n.meta["val"] for n in given]
    with fake_mode([examples, weight.meta["val"]]), torch.no_grad():
        traced = make_fx(run)(*examples).graph
    return list(edit.inline(traced, given, place=weight))


def _fold(node: fx.Node, edit: Editor, alone: set[fx.Node], rules: Lookup) -> fx.Node | None:
    arguments = _arguments(node)
    assert arguments is not None
    x, weight, bias = arguments
    batch = _batch_dimension(x)
    is_convolution = node.target in CONVOLUTIONS
    sizes = _sizes(node) if is_convolution else ()
    if sizes is None or (rules.linear and batch is None):
        return None
    transposed = not is_convolution and node.target is not aten.linear.default
    moments = _moments(edit, weight, alone, rules, transposed)
    moments += _moments(edit, bias, alone, rules, False)
    if is_convolution:
        return edit.op(torch.ops.momentprop.random_convolution.default, x, *moments, *sizes)
    if batch:
        x = edit.op(aten.transpose.int, x, 0, batch)
    out = edit.op(torch.ops.momentprop.random_linear.default, x, *moments)
    return edit.op(aten.transpose.int, out, 0, batch) if batch else out


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
    pads = borders(bound["padding"], kernel, dilation)
    if any(before != after for before, after in pads):
        return None
    return stride, [before for before, _ in pads], dilation, bound["groups"]
