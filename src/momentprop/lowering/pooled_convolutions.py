"""Joins convolutions with a scaling by channel or an averaging over windows that alone reads them.

Both are convolutions themselves. A factor per channel belongs to the weights. An average over k neighbours
along a dimension is a convolution with k times the stride: where the stride was 1,

    1/k sum_j z_(k i + j) = sum_u v_u x_(k i + u)  for  z_p = sum_u w_u x_(p + u),  v_u = 1/k sum_j w_(u - j).

That takes K + k - 1 products for K k, and nothing as large as z is written. Variances of pooling windows in
tier `fast` are such averages (rules/max_pooling.py).
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from momentprop.graph.edit import emit
from momentprop.graph.ops import AVERAGE_POOL, CONVOLUTION, CONVOLUTIONS
from momentprop.graph.schema import bind
from momentprop.rules.convolution import borders
from momentprop.rules.families import per_dimension

aten = torch.ops.aten

_GROWTH = 2  # of a kernel: far larger windows are better averaged than convolved


def join_convolutions(graph: fx.Graph) -> None:
    """Join convolutions, in place, with the scaling or averaging that alone reads them."""
    for product in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        _scale(graph, product)
    for n, op in AVERAGE_POOL.items():
        for pooling in graph.find_nodes(op="call_function", target=op):
            _average(graph, pooling, n)


def _scale(graph: fx.Graph, product: fx.Node) -> None:
    """conv(x, w, b) c -> conv(x, w c, b c)."""
    first, second = product.args
    convolution, factor = (first, second) if _is_lone_convolution(first) else (second, first)
    if not _is_lone_convolution(convolution) or not isinstance(factor, fx.Node) or factor is convolution:
        return
    given = _arguments(convolution)
    dim, scale, whole = given["weight"].meta["val"].dim(), factor.meta["val"], convolution.meta["val"]
    if not isinstance(scale, Tensor) or scale.dtype != whole.dtype or whole.dim() != dim:
        return
    sizes = [1] * (dim - scale.dim()) + list(scale.shape)
    if len(sizes) > dim or any(size != 1 for d, size in enumerate(sizes) if d != 1):
        return
    with graph.inserting_before(product):
        column = emit(graph, aten.reshape.default, (factor, [-1, *[1] * (dim - 1)]), product)
        given["weight"] = emit(graph, aten.mul.Tensor, (given["weight"], column), product)
        if given["bias"] is not None:
            flat = emit(graph, aten.reshape.default, (factor, [-1]), product)
            given["bias"] = emit(graph, aten.mul.Tensor, (given["bias"], flat), product)
        joined = emit(graph, convolution.target, tuple(given.values()), product)
    _replace(graph, product, convolution, joined)


def _average(graph: fx.Graph, pooling: fx.Node, n: int) -> None:
    """avg_pool(conv(x, w, b)) -> conv(x, v, b), with the pooling's stride."""
    convolution, asked = pooling.args[0], _arguments(pooling)
    if not _is_lone_convolution(convolution):
        return
    kernel = per_dimension(asked["kernel_size"], n)
    stride = per_dimension(asked["stride"], n) if asked["stride"] else kernel
    over_border = any(per_dimension(asked["padding"], n)) or asked["ceil_mode"]
    if stride != kernel or over_border or asked.get("divisor_override") is not None:
        return
    given = _arguments(convolution)
    weight: Any = given["weight"]
    sizes = list(weight.meta["val"].shape[2:])
    steps, spread = per_dimension(given["stride"], n), per_dimension(given["dilation"], n)
    pads = borders(given["padding"], sizes, spread)
    apart = [s // d if k > 1 else 0 for k, s, d in zip(kernel, steps, spread, strict=True)]  # in the kernel
    on_taps = all(k == 1 or s % d == 0 for k, s, d in zip(kernel, steps, spread, strict=True))
    growth = math.prod(1 + (k - 1) * m / size for k, m, size in zip(kernel, apart, sizes, strict=True))
    if growth > _GROWTH or not on_taps or any(before != after for before, after in pads):
        return
    given["stride"] = [s * k for s, k in zip(steps, kernel, strict=True)]
    given["padding"] = [before for before, _ in pads]
    with graph.inserting_before(pooling):
        for d, (k, m) in enumerate(zip(kernel, apart, strict=True)):
            weight = _averaged(graph, weight, d - n, k, m, pooling)
        given["weight"] = weight
        joined = emit(graph, CONVOLUTION[n], tuple(given.values()), pooling)
    _replace(graph, pooling, convolution, joined)


def _averaged(graph: fx.Graph, weight: fx.Node, dim: int, k: int, apart: int, place: fx.Node) -> fx.Node:
    """v_u = 1/k sum_j w_(u - j apart) along one dimension, counted from the last."""
    if k == 1:
        return weight
    shifted = []
    for j in range(k):
        pads = [0, 0] * (-dim - 1) + [j * apart, (k - 1 - j) * apart]
        shifted.append(emit(graph, aten.constant_pad_nd.default, (weight, pads), place))
    total = shifted[0]
    for other in shifted[1:]:
        total = emit(graph, aten.add.Tensor, (total, other), place)
    return emit(graph, aten.mul.Tensor, (total, 1 / k), place)


def _is_lone_convolution(node: Any) -> TypeGuard[fx.Node]:
    """One that a single operator reads."""
    return isinstance(node, fx.Node) and node.target in CONVOLUTIONS and len(node.users) == 1


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node by name, in the schema's order."""
    op: Any = node.target
    given = bind(op, node.args, node.kwargs)
    return {argument.name: given[argument.name] for argument in op._schema.arguments}


def _replace(graph: fx.Graph, last: fx.Node, convolution: fx.Node, joined: fx.Node) -> None:
    last.replace_all_uses_with(joined)
    graph.erase_node(last)
    graph.erase_node(convolution)
