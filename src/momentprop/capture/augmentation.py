"""Finds noise of training mode that is no dropout: random numbers added to values, as in augmentation.

    x + 0.1 * torch.randn_like(x)

Dropout multiplies, and so do its substitutes: `x * (1 + 0.3 * randn)`, stochastic depth, masks by hand.
Random weights add noise to parameters. All of these count. Noise of a fixed size that is added to what
depends on the inputs does not; where its size is learned, a graph does not tell what it is meant for.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, fx

from momentprop.capture.draws import CENTERS, DRAWS
from momentprop.errors import TraceNote
from momentprop.graph.edit import emit, remove_unused
from momentprop.graph.ops import DIFFERENCES, SUMS
from momentprop.graph.place import place_of
from momentprop.graph.reach import reach, values_of
from momentprop.graph.schema import bind

aten = torch.ops.aten

_ADVICE = "`dropout=` chooses the modules whose noise counts"
_ABOUT = aten.normal.Tensor_float  # (mean, std): noise added to a mean
_SHAPED: dict[Any, Any] = {  # what makes numbers of the same shape
    aten.randn.default: aten.full.default,
    aten.rand.default: aten.full.default,
    aten.normal.float_float: aten.full.default,
    aten.randn_like.default: aten.full_like.default,
    aten.rand_like.default: aten.full_like.default,
    aten.normal_functional.default: aten.full_like.default,
    aten.uniform.default: aten.full_like.default,
}


def leave_out_augmentation(
    graph: fx.Graph, inputs: Collection[fx.Node], parameters: Collection[fx.Node], drawn_in_eval: int
) -> bool:
    """Put the mean of noise that is added to values in its place, and say whether there was any.

    Where eval mode draws numbers too, the same ones may be meant, and all noise stays.
    """
    fixed, learned = _added_noise(graph, inputs, parameters)
    left_out, kept = ([], fixed + learned) if drawn_in_eval else (fixed, learned)
    if left_out:
        note = "noise of training mode that is added to values is no dropout and was left out"
        warnings.warn(f"{note}:{_places(left_out)}\n{_ADVICE}; dropout=nn.Module counts all", TraceNote, 7)
    if len(kept) > drawn_in_eval:
        note = "noise that is added to values counts: it cannot be told from dropout"
        warnings.warn(f"{note}:{_places(kept)}\n{_ADVICE}", TraceNote, 7)
    for node in left_out:
        with graph.inserting_before(node):
            node.replace_all_uses_with(_mean(graph, node))
    remove_unused(graph)
    return bool(left_out)


def _added_noise(
    graph: fx.Graph, inputs: Collection[fx.Node], parameters: Collection[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """What draws the numbers that are added to what depends on the inputs: of fixed, and of learned size."""
    varying = _computed_from(graph, inputs)
    by_parameters = _computed_from(graph, parameters)
    fixed: list[fx.Node] = []
    learned: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is _ABOUT and node.args[0] in varying:
            fixed.append(node)
        elif node.target in _SHAPED:
            noise = _noise(node, varying)
            met = {user for n in noise for user in n.users if user in varying}
            if any(n.target in (*SUMS, *DIFFERENCES) for n in met):
                told = all(n.target in (*SUMS, *DIFFERENCES) for n in met) and by_parameters.isdisjoint(noise)
                (fixed if told else learned).append(node)
    return fixed, learned


def _places(draws: Collection[fx.Node]) -> str:
    """Name where numbers are drawn, one line each."""
    return "".join(f"\n  {place_of(node)}".rstrip() for node in draws)


def _mean(graph: fx.Graph, node: fx.Node) -> fx.Node:
    op: Any = node.target
    if op is _ABOUT:
        return cast(fx.Node, node.args[0])
    arguments, draw = bind(op, node.args, node.kwargs), DRAWS[op]
    center = torch.full((), CENTERS[draw.generate], dtype=torch.float64)
    numbers = [v for k, v in arguments.items() if k in ("mean", "std", "from", "to")]
    blank = () if "size" in arguments else (center,)  # draws of another's shape take it first
    value = float(draw.apply(center, *blank, *numbers))
    shape = arguments.get("size", node.args[0])
    options = {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device}
    return emit(graph, _SHAPED[op], (shape, value), node, options)


def _computed_from(graph: fx.Graph, starts: Collection[fx.Node]) -> set[fx.Node]:
    """All values that depend on some, other than by their shape."""
    return reach(graph, starts, carries=lambda n: isinstance(n.meta.get("val"), Tensor), brings=_values)


def _values(node: fx.Node) -> list[fx.Node]:
    return [] if node.target in _SHAPED else values_of(node)


def _noise(draw: fx.Node, varying: Collection[fx.Node]) -> list[fx.Node]:
    """The draw, and what is computed of it without the inputs, such as its product with a number."""
    found = [draw]
    for node in found:  # which grows meanwhile
        found += [n for n in node.users if n not in varying and n not in found]
    return found
