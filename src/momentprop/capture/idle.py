"""Runs a traced graph with its noise idle: dropouts pass their input, other noise takes its mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from momentprop.capture.draws import CENTERS, DRAWS
from momentprop.capture.randomness import OwnNumbers
from momentprop.graph.ops import DROPOUTS, STRIDED_VIEWS, draws
from momentprop.graph.schema import bind

aten = torch.ops.aten

_SWITCHES = {"p": 0.0, "dropout": 0.0, "dropout_p": 0.0, "train": False, "training": False}
_NO_MEAN = 0.618  # of a Bernoulli variable that anybody would write
_SEED = 0


def run(
    graph: fx.Graph, root: nn.Module, inputs: Sequence[Sequence[Any]], centred: bool = True
) -> Iterator[tuple[fx.Node, list[Any]]]:
    """Yield every node with its values, one for each of several lists of inputs that run side by side.

    A value is freed after its last use, so that few are held at once. The output comes last, as lists.
    Unless `centred`, noise is not its mean but some other number, the same every time: means may be 0, or
    cancel each other, and so hide what they are multiplied with.
    """
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    given = iter(zip(*inputs, strict=True))
    held: dict[fx.Node, list[Any]] = {}
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                values = list(next(given))
            elif node.op == "get_attr":
                values = [getattr(root, str(node.target))] * len(inputs)
            else:
                values = [_evaluate(node, held, i, centred) for i in range(len(inputs))]
            held[node] = values
            yield node, values
            for used in (node, *node.all_input_nodes):
                if last.get(used, node) is node:
                    held.pop(used, None)


def outputs_of(graph: fx.Graph, root: nn.Module, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of the graph alone."""
    (found,) = [values[0] for node, values in run(graph, root, [inputs]) if node.op == "output"]
    return list(found)


def hides_noise(graph: fx.Graph) -> bool:
    """Say whether random numbers are drawn within a block (autocast, cond), out of reach of this module."""
    blocks = [getattr(graph.owning_module, str(node.target)) for node in graph.find_nodes(op="get_attr")]
    inner = [block.graph for block in blocks if isinstance(block, fx.GraphModule)]
    return any(draws(node.target) for g in inner for node in g.nodes) or any(map(hides_noise, inner))


def _evaluate(node: fx.Node, held: dict[fx.Node, list[Any]], i: int, centred: bool) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: held[n][i])
    return args[0] if node.op == "output" else _idle(node.target, args, kwargs, centred)


def _idle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], centred: bool) -> Any:
    if op in STRIDED_VIEWS:  # strides are not always those of the trace, where dropouts made new tensors
        return aten.reshape.default(*args, **kwargs)
    if not draws(op):
        return op(*args, **kwargs)
    if op in DROPOUTS:
        return args[0]
    arguments = bind(op, args, kwargs)
    if op is aten.bernoulli.default:
        return args[0].clone()
    if op is aten.bernoulli.p:
        return torch.full_like(args[0], arguments["p"] if centred else _NO_MEAN)
    if op in DRAWS and centred:
        draw = DRAWS[op]
        return draw.apply(torch.full_like(_drawn(op, args, kwargs), CENTERS[draw.generate]), *args, **kwargs)
    for name, off in _SWITCHES.items():
        if name in arguments:
            arguments[name] = off
    positional = [arguments.pop(a.name) for a in op._schema.arguments if not a.kwarg_only]
    return _drawn(op, tuple(positional), arguments)


def _drawn(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run the operator itself, with the same numbers every time."""
    with OwnNumbers(_SEED):
        drawn: Tensor = op(*args, **kwargs)
        return drawn
