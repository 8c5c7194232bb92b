"""Turns a program that torch.export fixes to the batch of its examples into one for any batch size.

torch.vmap does that in many operators. With a batch that is fixed anyway nothing is lost: so the module is
traced with batches of three sizes, and every number that differs between the graphs is written as a linear
function of the batch's size: two sizes give it, the third confirms it. What is not linear, or not the same
graph, is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten
_FEWER = (8, 21)  # samples than in the first batch, in the others: odd and even sizes


def with_free_batch(module: nn.Module, tensors: Sequence[Tensor], dynamic: Sequence[Any]) -> nn.Module:
    """Make the same function of `*tensors` for any batch size, or raise ValueError.

    `dynamic` is None for tensors without a batch.
    """
    free = [i for i, sizes in enumerate(dynamic) if sizes is not None]
    if not free:
        raise ValueError("no input has a batch")
    batch = tensors[free[0]].shape[0]
    sizes = [batch, *[batch - less for less in _FEWER]]
    graphs = [_traced(module, [t[:n] if i in free else t for i, t in enumerate(tensors)]) for n in sizes]
    return Positional(_generalized(graphs, free[0], sizes))


class Positional(nn.Module):
    """Hides the names of a module's inputs, which torch.export wants to be told with their free sizes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *tensors: Tensor) -> Any:
        return self.inner(*tensors)


def _traced(module: nn.Module, tensors: Sequence[Tensor]) -> fx.GraphModule:
    with torch.no_grad():
        traced: fx.GraphModule = make_fx(lambda *values: module(*values))(*tensors)
    traced.graph.eliminate_dead_code()
    return traced


def _generalized(graphs: Sequence[fx.GraphModule], place: int, sizes: Sequence[int]) -> fx.GraphModule:
    """The first of the graphs, with functions of the batch's size where the others have other numbers."""
    first, every = graphs[0], [list(graph.graph.nodes) for graph in graphs]
    if any([(n.op, n.target) for n in nodes] != [(n.op, n.target) for n in every[0]] for nodes in every):
        raise ValueError("other operators are run for other batches")
    inputs = [node for node in every[0] if node.op == "placeholder"]
    with first.graph.inserting_after(inputs[-1]):
        size = first.graph.call_function(aten.sym_size.int, (inputs[place], 0))
    known: dict[tuple[int, int], fx.Node] = {(1, 0): size}

    def number(values: Sequence[int]) -> fx.Node:
        """factor * batch + rest, from its values for all batches."""
        factor = (values[0] - values[1]) // (sizes[0] - sizes[1])
        rest = values[0] - factor * sizes[0]
        if [factor * n + rest for n in sizes] != list(values):
            raise ValueError(f"{values} are no linear function of the batch's size")
        if (factor, 0) not in known:
            with first.graph.inserting_after(size):
                known[factor, 0] = first.graph.call_function(operator.mul, (size, factor))
        if (factor, rest) not in known:
            with first.graph.inserting_after(known[factor, 0]):
                known[factor, rest] = first.graph.call_function(operator.add, (known[factor, 0], rest))
        return known[factor, rest]

    for nodes in zip(*every, strict=True):
        if nodes[0].op == "get_attr":
            constants = [getattr(graph, n.target) for graph, n in zip(graphs, nodes, strict=True)]
            if not all(_alike(constants[0], c) for c in constants):
                raise ValueError("constants depend on the batch")
        elif nodes[0].op == "call_function":
            nodes[0].args, nodes[0].kwargs = _merged([(n.args, n.kwargs) for n in nodes], number)
    first.graph.lint()
    first.recompile()
    return first


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return True
    return one is other or (one.shape == other.shape and torch.equal(one, other))


def _merged(arguments: Sequence[Any], number: Callable[[Sequence[int]], fx.Node]) -> Any:
    flat, specs = zip(*map(pytree.tree_flatten, arguments), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise ValueError("operators have other arguments for other batches")
    merged = []
    for values in zip(*flat, strict=True):
        if isinstance(values[0], fx.Node) or all(v == values[0] for v in values):
            merged.append(values[0])
        elif all(type(v) is int for v in values):
            merged.append(number(values))
        else:
            raise ValueError(f"arguments of an operator are {values} for batches of different size")
    return pytree.tree_unflatten(merged, specs[0])
