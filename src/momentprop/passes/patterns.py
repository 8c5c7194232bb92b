"""Several operators that are one function, recognised and made one node.

Rules of the parts would take factors for independent that are functions of the same value. Two such patterns
are looked for, in every tier:

- any composition of operators that work element by element on one tensor, where it meets itself again:
  x * sigmoid(x), tanh-GELU written out with powers and tanh, x * x * x. It becomes a single activation, whose
  moments come by quadrature;
- x / sqrt(mean(x^2) + eps), RMS norm, with or without a mean subtracted before.

Beside them, operators that return values together with something else give the values by an operator that
has a rule: the maxima of `max(dim)` and of pooling with indices, the variance of `var_mean`.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.capture.trace import Trace
from momentprop.gaussian.quadrature import expectation
from momentprop.graph.edit import emit
from momentprop.graph.private import OpOverload
from momentprop.moments import Moments
from momentprop.passes.unpooling import join_unpooling
from momentprop.rules.local import Elementwise, residual
from momentprop.rules.registry import Rule

aten = torch.ops.aten

# which torch does not tag as pointwise
_POINTWISE = (aten.prelu.default, aten.log_sigmoid.default, aten.hardswish.default)
_SAME = (aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default)


def recognise(trace: Trace) -> Trace:
    """The trace with such patterns as single nodes; the one given is left alone."""
    graph = trace.copy_graph()
    inputs = [n for n in graph.nodes if n.op == "placeholder"][len(trace.state) :]
    for node in list(graph.nodes):
        if node.target is aten.mul.Tensor or node.target is aten.div.Tensor:
            _recognise_rms_norm(graph, node)
        elif node.target is operator.getitem:
            _read_value(graph, node)
        elif node.target is aten.max_unpool2d.default:
            join_unpooling(graph, node)
    for region in _regions(graph, inputs):
        _compose(graph, region)
    graph.eliminate_dead_code()
    graph.lint()
    return dataclasses.replace(trace, graph=graph)


@dataclasses.dataclass(frozen=True)
class _Region:
    root: fx.Node
    last: fx.Node
    inner: list[fx.Node]  # from root to last, without the root
    users: list[fx.Node]  # of the last one, outside


def _regions(graph: fx.Graph, inputs: list[fx.Node]) -> list[_Region]:
    """Compositions of operators element by element of one value that use it more than once.

    The largest ones, and parts of them that are used elsewhere too.
    """
    root: dict[fx.Node, fx.Node] = {node: node for node in inputs}  # of every value that varies
    joins: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        varying = [n for n in node.all_input_nodes if n in root]
        if node.op != "call_function" or not (varying or _draws(node)):
            continue
        roots = {root[n] for n in varying}
        (first, *others) = roots or {node}
        if varying and not others and _is_pointwise(node) and _shape(node) == _shape(first):
            root[node] = first
            several = sum(n in root for n in _arguments(node)) > 1
            joins[node] = several or any(joins.get(n, False) for n in varying)
        else:
            root[node] = node
    found = []
    for last, joined in joins.items():
        same_type = _dtype(last) == _dtype(root[last])
        if joined and same_type and not all(_continues(u, last, root) for u in last.users):
            inner = _between(root[last], last, root)
            if len(inner) > 1 or inner[0].target is not aten.mul.Tensor:  # x * x has a rule
                outside = [u for u in last.users if not _continues(u, last, root)]
                found.append(_Region(root[last], last, inner, outside))
    return found


def _continues(user: fx.Node, node: fx.Node, root: dict[fx.Node, fx.Node]) -> bool:
    """Whether a user of the node belongs to the same composition."""
    return user is not root.get(user) and root.get(user) is root[node]


def _between(first: fx.Node, last: fx.Node, root: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """What of the region `last` needs, in order."""
    needed: set[fx.Node] = set()
    stack = [last]
    while stack:
        node = stack.pop()
        if node is not first and node not in needed:
            needed.add(node)
            stack.extend(n for n in node.all_input_nodes if n in root)
    return [node for node in first.graph.nodes if node in needed]


def _draws(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _is_pointwise(node: fx.Node) -> bool:
    op, value = node.target, node.meta.get("val")
    if not isinstance(op, OpOverload) or not isinstance(value, Tensor):
        return False
    if not (value.is_floating_point() or value.dtype == torch.bool):
        return False
    if _draws(node):
        return False
    if op in _SAME or op in _POINTWISE or op is aten.to.dtype:
        return True
    return torch.Tag.pointwise in op.tags


def _arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


def _shape(node: fx.Node) -> Any:
    """The shape, compared without asking anything of symbolic sizes."""
    value = node.meta.get("val")
    return tuple(map(str, value.shape)) if isinstance(value, Tensor) else None


def _dtype(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _compose(graph: fx.Graph, region: _Region) -> None:
    inner = fx.Graph()
    env = {region.root: inner.placeholder("x")}
    outer: list[fx.Node] = []
    for node in region.inner:
        for n in node.all_input_nodes:
            if n not in env and n not in region.inner:
                env[n] = inner.placeholder(f"c{len(outer)}")
                outer.append(n)
    for node in region.inner:
        env[node] = inner.node_copy(node, env.__getitem__)
    inner.output(env[region.last])
    with graph.inserting_before(region.last):
        composed = graph.call_function(_composed_rule(inner), (region.root, *outer))
    composed.meta = dict(region.last.meta)
    region.last.replace_all_uses_with(composed, delete_user_cb=region.users.__contains__)


def _composed_rule(graph: fx.Graph) -> Rule:
    function = fx.GraphModule(torch.nn.Module(), graph, "Composed")

    def moments(x: Moments, *constants: Any) -> Moments:
        center = function(x.mean, *constants)

        def inside(t: Tensor) -> Tensor:
            """Points outside the function's domain count as its center."""
            value = function(t, *constants)
            return torch.where(value.isfinite(), value, center)

        mean, variance, gain = expectation(inside, x.mean, x.variance)
        out = Moments(mean, variance)
        out._gain = gain  # type: ignore[attr-defined]
        return out

    def local(out: Any, x: Moments, *constants: Any) -> Elementwise:
        return Elementwise(out._gain, residual(out.variance, out._gain, x.variance))

    return Rule(
        function,  # type: ignore[arg-type]
        moments,
        exactness="approximate: quadrature with 13 points, if Gaussian",
        reference="Gauss-Hermite",
        elementwise=True,
        local=local,
    )


_POOLS = {
    aten.max_pool1d_with_indices.default: aten.max_pool1d.default,
    aten.max_pool2d_with_indices.default: aten.max_pool2d.default,
    aten.max_pool3d_with_indices.default: aten.max_pool3d.default,
}
_ADAPTIVE_POOLS = {
    aten.adaptive_max_pool1d.default: (1, aten.max_pool1d.default),
    aten.adaptive_max_pool2d.default: (2, aten.max_pool2d.default),
    aten.adaptive_max_pool3d.default: (3, aten.max_pool3d.default),
}


def _read_value(graph: fx.Graph, node: fx.Node) -> None:
    """One of several results, by an operator of its own."""
    source, index = node.args
    if not isinstance(source, fx.Node):
        return
    value, given = source.args[0] if source.args else None, source.args[1:]
    target: Any = None
    kwargs = dict(source.kwargs)
    if source.target in (aten.max.dim, aten.min.dim) and index == 0:
        target = aten.amax.default if source.target is aten.max.dim else aten.amin.default
        given = ([given[0]], *given[1:])
    elif source.target in _POOLS and index == 0:
        target = _POOLS[source.target]
    elif source.target in _ADAPTIVE_POOLS and index == 0:
        n, target = _ADAPTIVE_POOLS[source.target]
        sizes = value.meta["val"].shape[-n:]  # type: ignore[union-attr]
        counts = node.meta["val"].shape[-n:]
        if not all(isinstance(s, int) and s % c == 0 for s, c in zip(sizes, counts, strict=True)):
            return
        given = ([s // c for s, c in zip(sizes, counts, strict=True)],)
    elif source.target is aten.var_mean.correction and index == 0:
        target = aten.var.correction
    elif source.target is aten.var_mean.correction and index == 1:
        target = aten.mean.dim
        dims = given[0] if given and given[0] is not None else list(range(value.meta["val"].dim()))  # type: ignore[union-attr]
        given, kwargs = (dims, bool(kwargs.get("keepdim", False))), {}
    if target is None:
        return
    with graph.inserting_before(node):
        read = emit(graph, target, (value, *given), node, kwargs)
    node.replace_all_uses_with(read)
    graph.erase_node(node)


def _recognise_rms_norm(graph: fx.Graph, node: fx.Node) -> None:
    """x * rsqrt(mean(x^2) + eps), x / sqrt(mean(x^2) + eps): over one dimension."""
    x, factor = node.args[:2]
    pairs = [(x, factor), (factor, x)] if node.target is aten.mul.Tensor else [(x, factor)]
    for value, scale in pairs:
        found = _mean_square(scale, inverse=node.target is aten.mul.Tensor)
        if found is None or not isinstance(value, fx.Node):
            continue
        source, dim, eps = found
        if source is not value:
            continue
        n = value.meta["val"].dim()
        size = value.meta["val"].shape[dim]
        if not isinstance(size, int):
            return
        with graph.inserting_before(node):
            last = dim % n == n - 1
            moved = value if last else emit(graph, aten.transpose.int, (value, dim, -1), node)
            normed = emit(graph, aten.rms_norm.default, (moved, [size], None, eps), node)
            result = normed if last else emit(graph, aten.transpose.int, (normed, dim, -1), node)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        return


def _mean_square(node: Any, inverse: bool) -> tuple[fx.Node, int, float] | None:
    """(x, dim, eps) of rsqrt(mean(x^2, dim, keepdim) + eps), or of the square root."""
    if not isinstance(node, fx.Node):
        return None
    op, power = (aten.rsqrt.default, -0.5) if inverse else (aten.sqrt.default, 0.5)
    if node.target is not op and not _is_power(node, power):
        return None
    inner: Any = node.args[0]
    if inner.target not in (aten.add.Tensor, aten.add.Scalar) or inner.kwargs:
        return None
    mean, eps = inner.args[:2]
    if isinstance(eps, fx.Node):
        mean, eps = eps, mean
    if not isinstance(mean, fx.Node) or not isinstance(eps, (int, float)) or mean.target is not aten.mean.dim:
        return None
    square, dims, keepdim = (*mean.args, None, False)[:3]
    if not keepdim or not isinstance(dims, (list, tuple)) or len(dims) != 1 or mean.kwargs:
        return None
    if not isinstance(square, fx.Node):
        return None
    itself = square.target is aten.mul.Tensor and square.args[0] is square.args[1]
    if itself or square.target is aten.square.default or _is_power(square, 2):
        return square.args[0], dims[0], float(eps)  # type: ignore[return-value]
    return None


def _is_power(node: fx.Node, exponent: float) -> bool:
    return node.target is aten.pow.Tensor_Scalar and bool(node.args[1] == exponent)
