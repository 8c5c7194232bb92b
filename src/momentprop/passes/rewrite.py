"""Exact rewrites of the traced graph: the same function of the same inputs, easier on the rules.

Every rewrite keeps the deterministic function for every mask; parameters are not looked at, so they stay
true when the weights change. What is recomputed per call (folded weights) is small beside the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.capture.trace import Trace
from momentprop.graph.schema import bind
from momentprop.rules.convolution import CONVOLUTIONS

aten = torch.ops.aten

_POOLS = (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
_MONOTONE = (
    aten.relu.default,
    aten.relu6.default,
    aten.hardtanh.default,
    aten.hardsigmoid.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.selu.default,
    aten.exp.default,
)
_HOMOGENEOUS = (aten.relu.default, aten.leaky_relu.default, aten.prelu.default)
_SCALING_DROPOUTS = (aten.dropout.default, aten.feature_dropout.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_SAME_ORDER = (
    *_VIEWS,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.unsqueeze.default,
    aten.contiguous.default,
    aten.clone.default,
)


def rewrite(trace: Trace) -> Trace:
    """The trace with all rewrites applied; the one given is left alone."""
    graph = trace.copy_graph()
    for apply in (
        merge_reshapes,
        fold_scalar_chains,
        fold_batch_norm,
        pool_before_activation,
        activate_before_dropout,
    ):
        for node in list(graph.nodes):
            if node.op == "call_function":
                apply(graph, node)
    graph.eliminate_dead_code()
    graph.lint()
    return dataclasses.replace(trace, graph=graph)


def pool_before_activation(graph: fx.Graph, pool: fx.Node) -> None:
    """max_pool(f(x)) = f(max_pool(x)) for non-decreasing f: the largest f(x_i) is f of the largest x_i.

    Pooling then sees values that are close to Gaussian, and f works on fewer elements. For batch norm,
    y = s x + b channel by channel, f is non-decreasing or non-increasing with the sign of s; and for
    non-increasing f the largest f(x_i) is f(min x_i) = f(-max(-x_i)). In one formula for both,

        max_pool(f(x)) = f(t max_pool(t x)),   t = sign(s).

    A chain of such functions has the product of their signs. (Where s = 0, f is constant and its argument
    does not matter.) Channel dropout is one too: every element of a window is multiplied by the same number,
    0 or 1 / (1-p).
    """
    if pool.target not in _POOLS or pool.meta["val"].dim() != _POOLS.index(pool.target) + 3:
        return  # without a batch dimension, what it pools over may be the channels of a norm
    chain: list[fx.Node] = []
    signs: list[fx.Node] = []
    x = pool.args[0]
    while isinstance(x, fx.Node) and len(x.users) == 1:
        if x.target is aten.batch_norm.default and _has_running_statistics(x):
            if (weight := x.args[1]) is not None:
                signs.append(weight)  # type: ignore[arg-type]
        elif x.target not in (*_MONOTONE, aten.feature_dropout.default):
            break
        chain.append(x)
        x = x.args[0]
    if not chain:
        return
    with graph.inserting_before(pool):
        factor = None
        for weight in signs:
            one = _op(graph, aten.sign.default, (weight,), like=weight)
            factor = one if factor is None else _op(graph, aten.mul.Tensor, (factor, one), like=one)
        value: Any = x
        if factor is not None:
            spatial = len(pool.meta["val"].shape) - 2
            factor = _op(graph, aten.reshape.default, (factor, [-1, *[1] * spatial]), like=pool)
            value = _op(graph, aten.mul.Tensor, (value, factor), like=x)
        value = _op(graph, pool.target, (value, *pool.args[1:]), like=pool)
        if factor is not None:
            value = _op(graph, aten.mul.Tensor, (value, factor), like=pool)
        for f in reversed(chain):
            value = _op(graph, f.target, (value, *f.args[1:]), like=pool, place=f)
    _replace(graph, pool, value)
    for f in chain:
        graph.erase_node(f)


def activate_before_dropout(graph: fx.Graph, activation: fx.Node) -> None:
    """f(c x) = c f(x) for c >= 0 and f like ReLU: dropout may wait, which multiplies by 0 or 1/(1-p).

    The activation then sees x, which is close to Gaussian or not random at all, instead of a value that is
    often 0; and the noise of dropout is known exactly behind it.
    """
    dropout = activation.args[0] if activation.args else None
    if activation.target not in _HOMOGENEOUS or not isinstance(dropout, fx.Node):
        return
    if dropout.target not in _SCALING_DROPOUTS or len(dropout.users) != 1:
        return
    with graph.inserting_before(dropout):
        args = (dropout.args[0], *activation.args[1:])
        first = _op(graph, activation.target, args, like=activation)
    dropout.args = (first, *dropout.args[1:])
    _replace(graph, activation, dropout)


def fold_batch_norm(graph: fx.Graph, norm: fx.Node) -> None:
    """s (W x + b - m) + beta = (s W) x + (s (b - m) + beta), with s = gamma / sqrt(v + eps) per channel."""
    if norm.target is not aten.batch_norm.default or not _has_running_statistics(norm):
        return
    layer, gamma, beta, mean, variance, _, _, eps, _ = norm.args
    if not isinstance(layer, fx.Node) or len(layer.users) != 1:
        return
    channels_second = len(norm.meta["val"].shape) == 2 and layer.target is aten.linear.default
    batched = layer.target in CONVOLUTIONS and len(layer.meta["val"].shape) == _weight_of(layer).dim()
    if not (channels_second or batched):
        return
    arguments = bind(layer.target, layer.args, layer.kwargs)  # type: ignore[arg-type]
    weight, bias = arguments["weight"], arguments["bias"]
    with graph.inserting_before(layer):
        scale = _op(graph, aten.add.Scalar, (variance, eps), like=variance)
        scale = _op(graph, aten.rsqrt.default, (scale,), like=variance)
        if gamma is not None:
            scale = _op(graph, aten.mul.Tensor, (scale, gamma), like=variance)
        column = [-1, *[1] * (_weight_of(layer).dim() - 1)]
        factor = _op(graph, aten.reshape.default, (scale, column), like=weight)
        new_weight = _op(graph, aten.mul.Tensor, (weight, factor), like=weight)
        shift = mean if bias is None else _op(graph, aten.sub.Tensor, (mean, bias), like=variance)
        shift = _op(graph, aten.mul.Tensor, (shift, scale), like=variance)
        new_bias = (
            _op(graph, aten.neg.default, (shift,), like=variance)
            if beta is None
            else _op(graph, aten.sub.Tensor, (beta, shift), like=variance)
        )
        arguments.update(weight=new_weight, bias=new_bias)
        names = [a.name for a in layer.target._schema.arguments]  # type: ignore[union-attr]
        folded = _op(graph, layer.target, tuple(arguments[n] for n in names), like=norm, place=layer)
    _replace(graph, norm, folded)
    graph.erase_node(layer)


def merge_reshapes(graph: fx.Graph, view: fx.Node) -> None:
    """Reshapes keep the elements in row-major order, so of several in a row the last one counts."""
    if view.target not in _VIEWS:
        return
    inner = view.args[0]
    while isinstance(inner, fx.Node) and inner.target in _SAME_ORDER:
        inner = inner.args[0]
    if inner is not view.args[0]:
        view.target = aten.reshape.default
        view.args = (inner, *view.args[1:])


def fold_scalar_chains(graph: fx.Graph, last: fx.Node) -> None:
    """Operators x -> a x + b with numbers a, b compose to one: c (a x + b) + d = (c a) x + (c b + d)."""
    chain: list[fx.Node] = []
    scale, shift = 1.0, 0.0
    x: Any = last
    while isinstance(x, fx.Node) and (number := _scalar_affine(x)) is not None:
        if chain and len(x.users) > 1:
            break
        a, b = number
        scale, shift = scale * a, shift + scale * b
        chain.append(x)
        x = x.args[0]
    needed = (scale != 1) + (shift != 0)
    if len(chain) <= max(needed, 1) or any(_scalar_affine(u) is not None for u in last.users):
        return  # nothing to gain, or part of a longer chain
    with graph.inserting_before(last):
        value = x
        if scale != 1:
            value = _op(graph, aten.mul.Tensor, (value, scale), like=last)
        if shift != 0:
            value = _op(graph, aten.add.Tensor, (value, shift), like=last)
    _replace(graph, last, value)


def _scalar_affine(node: fx.Node) -> tuple[float, float] | None:
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
    alpha = bind(node.target, node.args, node.kwargs).get("alpha", 1)  # type: ignore[arg-type]
    if node.args[1] == 0 and node.target in (aten.div.Tensor, aten.div.Scalar):
        return None
    return make(node.args[1], alpha)


_AFFINE: dict[Any, Callable[[float, float], tuple[float, float]]] = {
    op: make
    for ops, make in (
        ((aten.add.Tensor, aten.add.Scalar), lambda c, alpha: (1.0, c * alpha)),
        ((aten.sub.Tensor, aten.sub.Scalar), lambda c, alpha: (1.0, -c * alpha)),
        ((aten.rsub.Scalar,), lambda c, alpha: (-alpha, c)),
        ((aten.mul.Tensor, aten.mul.Scalar), lambda c, alpha: (c, 0.0)),
        ((aten.div.Tensor, aten.div.Scalar), lambda c, alpha: (1 / c, 0.0)),
    )
    for op in ops
}


def _weight_of(layer: fx.Node) -> Tensor:
    return layer.args[1].meta["val"]  # type: ignore[union-attr]


def _has_running_statistics(norm: fx.Node) -> bool:
    arguments = bind(norm.target, norm.args, norm.kwargs)  # type: ignore[arg-type]
    return not arguments["training"] and arguments["running_var"] is not None


def _op(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: Any, place: Any = None) -> fx.Node:
    """A new node with the value of `like` (for its dtype and, roughly, shape) and the place of `place`."""
    node = graph.call_function(target, args)
    node.meta = {**(place or like).meta, "val": like.meta["val"]}
    return node


def _replace(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    graph.erase_node(old)
