"""Decomposes an operator without a rule into operators that have one, by PyTorch's own decompositions.

Only operators that need it are decomposed: decomposing a whole graph erases or rewrites its dropouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from momentprop.capture.attention import ATTENTION, spell_out_attention
from momentprop.graph.edit import Editor, fake_mode
from momentprop.graph.ops import RECURRENT
from momentprop.graph.place import DECOMPOSED
from momentprop.graph.private import OpOverload, decomposition_table
from momentprop.graph.reach import creates_noise
from momentprop.graph.schema import inputs_of, pass_by_position
from momentprop.passes.coverage import analyze
from momentprop.rules.registry import Lookup

aten = torch.ops.aten

_VALUES = (Tensor, torch.SymInt)
_DEPTH = 8  # decompositions within decompositions


def decompose(graph: fx.Graph, nodes: list[fx.Node], rules: Lookup) -> None:
    """Replace each node by its decomposition where that is covered by rules; leave the others alone."""
    for node in nodes:
        if node.target is ATTENTION:
            spell_out_attention(graph, node)
            continue
        expansion = _expand(node, rules, _DEPTH)
        if expansion is not None:
            substitute(graph, node, expansion)


def _expand(node: fx.Node, rules: Lookup, depth: int) -> fx.Graph | None:
    """A graph that computes the node from its tensor inputs and whose every operator has a rule."""
    function = _decomposition(node.target)
    if function is None or creates_noise(node) or depth == 0:
        return None
    graph = traced(node, function)
    if graph is None:
        return None  # stays uncovered, and is reported as such
    for inner in graph.nodes:
        pass_by_position(inner)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for inner, reason in analyze(graph, rules, placeholders).missing.items():
        deeper = _expand(inner, rules, depth - 1) if reason == "has no rule" else None
        if deeper is None or inner.target is node.target:
            return None
        substitute(graph, inner, deeper)
    return graph


def traced(
    node: fx.Node, function: Callable[..., Any], table: Mapping[Any, Callable[..., Any]] | None = None
) -> fx.Graph | None:
    """A graph that computes what the function does of the node's arguments; None where it cannot be traced.

    Its placeholders are the node's inputs. Operators in `table` are decomposed further.
    """
    values = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    leaves, spec = pytree.tree_flatten(values)
    given = [v for v in leaves if isinstance(v, _VALUES)]
    mode = fake_mode([given, node.meta.get("val")])
    if mode is None or len(given) != len(inputs_of(node)):
        return None

    def run(*inputs: Any) -> Any:
        rest = iter(inputs)
        filled = [next(rest) if isinstance(v, _VALUES) else v for v in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return function(*args, **kwargs)

    try:
        with mode, torch.no_grad():
            return make_fx(run, table)(*given).graph
    except Exception:
        return None


def _decomposition(op: Any) -> Callable[..., Any] | None:
    if not isinstance(op, OpOverload) or op in RECURRENT:  # which would be unrolled, and lose a free size
        return None
    if op in _EXPANSIONS:
        return _EXPANSIONS[op]
    if op._can_decompose():
        return op.decompose
    return decomposition_table.get(op)


def substitute(graph: fx.Graph, node: fx.Node, expansion: fx.Graph) -> None:
    """Put an expansion in place of the node, which keeps its name for messages."""
    for inner in expansion.nodes:
        inner.meta[DECOMPOSED] = str(node.target)
    edit = Editor(graph)
    with edit.at(node):
        output = edit.inline(expansion, inputs_of(node))
    edit.replace(node, output)


# What PyTorch does not decompose into operators with rules --------------------------------------------------


def _cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    lengths = [torch.linalg.vector_norm(v, dim=dim).clamp_min(eps) for v in (x, y)]
    return (x * y).sum(dim) / (lengths[0] * lengths[1])


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = ((x @ weight.movedim(0, -2).flatten(1)).unflatten(-1, (weight.shape[0], -1)) * y[..., None, :]).sum(
        -1
    )
    return out if bias is None else out + bias


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    return torch.logsumexp(torch.stack(torch.broadcast_tensors(x, y)), 0)


def _power_of_number(base: float, exponent: Tensor) -> Tensor:
    return torch.exp(exponent * math.log(base))


def _var_mean(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return torch.var(x, dim, correction=int(unbiased), keepdim=keepdim), torch.mean(x, dim, keepdim)


def _distances(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(x[..., :, None, :] - y[..., None, :, :], ord=p, dim=-1)


def _lerp(x: Tensor, y: Tensor, weight: Any) -> Tensor:
    return x * (1 - weight) + y * weight


def _product(x: Tensor, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    parts = x.unbind(dim)
    total = parts[0]
    for part in parts[1:]:
        total = total * part
    return total.unsqueeze(dim) if keepdim else total


def _random_slope(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


def _running_product(x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    totals: list[Tensor] = []
    for part in x.unbind(dim):
        totals.append(totals[-1] * part if totals else part)
    return torch.stack(totals, dim)


_EXPANSIONS: dict[Any, Callable[..., Any]] = {
    aten.cosine_similarity.default: _cosine_similarity,
    aten.bilinear.default: _bilinear,
    aten.logaddexp.default: _logaddexp,
    aten.pow.Scalar: _power_of_number,
    aten.var_mean.dim: _var_mean,
    aten.cdist.default: _distances,
    aten.lerp.Scalar: _lerp,
    aten.lerp.Tensor: _lerp,
    aten.rrelu.default: _random_slope,  # of eval mode: what draws numbers is not expanded
    aten.prod.dim_int: _product,
    aten.cumprod.default: _running_product,
}
