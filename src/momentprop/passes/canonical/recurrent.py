"""Takes apart recurrent layers that noise reaches: nn.LSTM, nn.GRU and nn.RNN, layer by layer.

In a traced graph several layers are one operator, with dropout between them as an argument. Here they become
one after the other, with dropout operators between them. Each stays one operator: it has a rule, and where
no noise reaches it, it is as fast as before. The same function of the same inputs and masks, so sampling
uses it as well.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from momentprop.capture.trace import Trace
from momentprop.graph.edit import Editor, remove_unused
from momentprop.graph.ops import RECURRENT
from momentprop.graph.reach import creates_noise, reach, values_of
from momentprop.graph.schema import bind
from momentprop.rules.registry import RULES, Role

aten = torch.ops.aten


def split_recurrent(trace: Trace, uncertain: Sequence[bool]) -> Trace:
    """Return the trace with recurrent layers that noise reaches one by one; itself if they are."""
    inputs = [node for node, random in zip(trace.input_nodes, uncertain, strict=True) if random]
    random = reach(trace.graph, inputs, creates_noise, _carries, values_of)
    names = {n.name for n in random if n.target in RECURRENT and _is_together(n)}
    if not names:
        return trace
    copy = dataclasses.replace(trace, graph=trace.copy_graph())
    edit = Editor(copy.graph)
    for node in [n for n in copy.graph.nodes if n.name in names]:
        with edit.at(node):
            edit.replace(node, _layers(node, edit))
    remove_unused(copy.graph)
    copy.graph.lint()
    return copy


def _is_together(node: fx.Node) -> bool:
    return _bound(node)["num_layers"] > 1 or creates_noise(node)


def _bound(node: fx.Node) -> dict[str, Any]:
    return bind(node.target, node.args, node.kwargs)  # type: ignore[arg-type]


def _layers(node: fx.Node, edit: Editor) -> list[fx.Node]:
    """All layers, with dropout between; output and last states as the operator returns them."""
    x, hx, params, has_biases, n_layers, p, train, bidirectional, batch_first = _bound(node).values()
    states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    n_directions = 2 if bidirectional else 1
    per_layer = len(params) // n_layers
    last: list[list[fx.Node]] = []
    for layer in range(n_layers):
        weights = params[layer * per_layer : (layer + 1) * per_layer]
        first = layer * n_directions
        mine = [edit.op(aten.slice.Tensor, s, 0, first, first + n_directions) for s in states]
        given = mine if isinstance(hx, (list, tuple)) else mine[0]
        # these operators do not run on fake tensors of variable size
        before = [s.meta["val"] for s in mine]
        size = (*x.meta["val"].shape[:2], before[0].shape[0] * before[0].shape[2])
        value = (x.meta["val"].new_empty(size), *before)
        options = (has_biases, 1, 0.0, False, bidirectional, batch_first)
        out = edit.op(node.target, x, given, weights, *options, value=value)
        x, *state = [edit.op(operator.getitem, out, i) for i in range(1 + len(states))]
        last.append(state)
        if layer + 1 < n_layers and p and train:
            x = edit.op(aten.dropout.default, x, p, True)
    wanted = [user.args[1] for user in node.users]
    joined = [
        edit.op(aten.cat.default, list(parts), 0) if i + 1 in wanted else x
        for i, parts in enumerate(zip(*last, strict=True))
    ]
    return [x, *joined]


def _carries(node: fx.Node) -> bool:
    rule = RULES.find(node.target)
    return rule is None or rule.role is not Role.SHAPE
