"""Writes out recurrent layers that noise reaches: nn.LSTM, nn.GRU, nn.RNN and their cells.

In a traced graph such a layer is one operator, with dropout between its layers as an argument. Here

- several layers become one after the other, with dropout operators between them;
- a layer that no noise reaches stays one operator, as fast as before;
- any other is unrolled over time, into operators that have rules. What every step does to its input,
  W_ih x, is done for all steps at once.

The same function of the same inputs and masks, so sampling uses it as well.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from momentprop.capture.trace import Trace
from momentprop.errors import MissingRuleError
from momentprop.graph.edit import Editor, remove_unused
from momentprop.graph.place import place_of
from momentprop.graph.reach import creates_noise, extend, values_of
from momentprop.graph.schema import bind
from momentprop.rules.registry import RULES, Role

aten = torch.ops.aten

Call = Callable[..., fx.Node]
# (call, W_ih x + b_ih, state, W_hh h + b_hh, constants) -> the next state, h first
Step = Callable[[Call, fx.Node, list[fx.Node], fx.Node, dict[str, fx.Node]], list[fx.Node]]


def _lstm(
    call: Call, given: fx.Node, state: list[fx.Node], recurrent: fx.Node, constants: dict[str, fx.Node]
) -> list[fx.Node]:
    """Compute all four gates as one sigmoid, by tanh(x) = 2 sigmoid(2 x) - 1: its moments take the time."""
    if "scale" not in constants:
        n = given.meta["val"].shape[-1] // 4
        one, two = (call(aten.new_full.default, given, [n], value) for value in (1.0, 2.0))
        constants["scale"] = call(aten.cat.default, [one, one, two, one])
    gates = call(aten.mul.Tensor, call(aten.add.Tensor, given, recurrent), constants["scale"])
    gates = call(aten.mul.Tensor, call(aten.sigmoid.default, gates), constants["scale"])
    i, f, g, o = _parts(call, call(aten.chunk.default, gates, 4, -1), 4)
    new = call(aten.mul.Tensor, i, call(aten.sub.Tensor, g, 1))
    c = call(aten.add.Tensor, call(aten.mul.Tensor, f, state[1]), new)
    return [call(aten.mul.Tensor, o, call(aten.tanh.default, c)), c]


def _gru(
    call: Call, given: fx.Node, state: list[fx.Node], recurrent: fx.Node, constants: dict[str, fx.Node]
) -> list[fx.Node]:
    size = given.meta["val"].shape[-1] // 3
    gates, new = _parts(call, call(aten.split_with_sizes.default, given, [2 * size, size], -1), 2)
    gates_h, new_h = _parts(call, call(aten.split_with_sizes.default, recurrent, [2 * size, size], -1), 2)
    gates = call(aten.sigmoid.default, call(aten.add.Tensor, gates, gates_h))
    r, z = _parts(call, call(aten.chunk.default, gates, 2, -1), 2)
    n = call(aten.tanh.default, call(aten.add.Tensor, new, call(aten.mul.Tensor, r, new_h)))
    # not n + z (h - n): of two terms that share a factor the variances add up best where it varies least
    kept = call(aten.mul.Tensor, z, state[0])
    return [call(aten.add.Tensor, kept, call(aten.mul.Tensor, call(aten.rsub.Scalar, z, 1), n))]


def _rnn(activation: Any) -> Step:
    def step(
        call: Call, given: fx.Node, state: list[fx.Node], recurrent: fx.Node, constants: dict[str, fx.Node]
    ) -> list[fx.Node]:
        return [call(activation, call(aten.add.Tensor, given, recurrent))]

    return step


def _parts(call: Call, parts: fx.Node, n: int) -> list[fx.Node]:
    return [call(operator.getitem, parts, i) for i in range(n)]


_LAYERS: dict[Any, Step] = {
    aten.lstm.input: _lstm,
    aten.gru.input: _gru,
    aten.rnn_tanh.input: _rnn(aten.tanh.default),
    aten.rnn_relu.input: _rnn(aten.relu.default),
}
_CELLS: dict[Any, Step] = {
    aten.lstm_cell.default: _lstm,
    aten.gru_cell.default: _gru,
    aten.rnn_tanh_cell.default: _rnn(aten.tanh.default),
    aten.rnn_relu_cell.default: _rnn(aten.relu.default),
}


def expand_recurrent(trace: Trace, uncertain: Sequence[bool]) -> Trace:
    """Return the trace with recurrent layers written out; itself where there are none."""
    if not any(node.target in _LAYERS or node.target in _CELLS for node in trace.graph.nodes):
        return trace
    copy = dataclasses.replace(trace, graph=trace.copy_graph())
    inputs = [node for node, random in zip(copy.input_nodes, uncertain, strict=True) if random]
    changed = _Expansion(copy.graph, set(inputs)).run()
    remove_unused(copy.graph)
    copy.graph.lint()
    return copy if changed else trace


class _Expansion:
    """Follows the noise through a graph, and writes out the recurrent layers it meets."""

    def __init__(self, graph: fx.Graph, random: set[fx.Node]) -> None:
        self.graph, self.random = graph, random
        self.edit = Editor(graph)
        self.node: fx.Node  # which is being written out
        self.values: dict[str, Any] = {}  # of calls of one kind: all steps are alike

    def run(self) -> bool:
        changed = False
        for node in list(self.graph.nodes):
            if node in self.edit.erased or not extend(self.random, node, creates_noise, _carries, values_of):
                continue
            if node.target in _LAYERS or node.target in _CELLS:
                self.node = node
                with self.edit.at(node):
                    results = self._layers() if node.target in _LAYERS else self._cell()
                self.edit.replace(node, results)
                changed = True
        return changed

    def call(self, target: Any, *args: Any, value: Any = None) -> fx.Node:
        """A new operator; its fake value may be given where that is hard or slow to compute."""
        kind = f"{target}{fx.map_arg(args, lambda n: _kind(n.meta['val']))}"
        node = self.edit.op(target, *args, value=self.values.get(kind, value))
        self.values[kind] = node.meta["val"]
        extend(self.random, node, creates_noise, _carries, values_of)
        return node

    def _cell(self) -> Any:
        x, hx, w_ih, w_hh, b_ih, b_hh = self._arguments()
        state = list(hx) if isinstance(hx, (list, tuple)) else [hx]
        given = self.call(aten.linear.default, x, w_ih, b_ih)
        recurrent = self.call(aten.linear.default, state[0], w_hh, b_hh)
        new = _CELLS[self.node.target](self.call, given, state, recurrent, {})
        return new if isinstance(hx, (list, tuple)) else new[0]

    def _arguments(self) -> list[Any]:
        op: Any = self.node.target
        bound = bind(op, self.node.args, self.node.kwargs)
        return [bound[a.name] for a in op._schema.arguments]

    def _layers(self) -> list[fx.Node]:
        """All layers, with dropout between; output and last states as the operator returns them."""
        x, hx, params, has_biases, n_layers, p, train, bidirectional, batch_first = self._arguments()
        states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
        n_directions = 2 if bidirectional else 1
        per_layer = len(params) // n_layers
        last: list[list[fx.Node]] = []
        for layer in range(n_layers):
            weights = params[layer * per_layer : (layer + 1) * per_layer]
            first = layer * n_directions
            mine = [self.call(aten.slice.Tensor, s, 0, first, first + n_directions) for s in states]
            if any(n in self.random for n in (x, *mine, *weights)):
                x, state = self._unrolled(x, mine, weights, has_biases, n_directions, batch_first)
            else:
                x, state = self._whole(x, mine, weights, has_biases, bidirectional, batch_first)
            last.append(state)
            if layer + 1 < n_layers and p and train:
                x = self.call(aten.dropout.default, x, p, True)
        wanted = [user.args[1] for user in self.node.users]
        joined = [
            self.call(aten.cat.default, list(parts), 0) if i + 1 in wanted else x
            for i, parts in enumerate(zip(*last, strict=True))
        ]
        return [x, *joined]

    def _whole(
        self, x: fx.Node, states: list[fx.Node], weights: list[fx.Node], *options: Any
    ) -> tuple[fx.Node, list[fx.Node]]:
        has_biases, bidirectional, batch_first = options
        hx = states if self.node.target is aten.lstm.input else states[0]
        args = (x, hx, weights, has_biases, 1, 0.0, False, bidirectional, batch_first)
        # these operators do not run on fake tensors of variable size
        given, before = x.meta["val"], [s.meta["val"] for s in states]
        size = (*given.shape[:2], before[0].shape[0] * before[0].shape[2])
        out = self.call(self.node.target, *args, value=(given.new_empty(size), *before))
        first, *rest = (self.call(operator.getitem, out, i) for i in range(1 + len(states)))
        return first, rest

    def _unrolled(
        self,
        x: fx.Node,
        states: list[fx.Node],
        weights: list[fx.Node],
        has_biases: bool,
        n_directions: int,
        batch_first: bool,
    ) -> tuple[fx.Node, list[fx.Node]]:
        per_direction = len(weights) // n_directions
        time = 1 if batch_first else 0
        outputs, last = [], []
        for direction in range(n_directions):
            mine = weights[direction * per_direction : (direction + 1) * per_direction]
            w_ih, w_hh, *others = mine
            b_ih, b_hh = others[:2] if has_biases else (None, None)
            projection = others[-1] if len(others) > 2 * has_biases else None
            n_steps = self._fixed(x, time)
            projected = self.call(aten.linear.default, x, w_ih, b_ih)
            step = projected.meta["val"].select(time, 0)
            steps = self.call(aten.unbind.int, projected, time, value=(step,) * n_steps)
            state = [self.call(aten.select.int, s, 0, direction) for s in states]
            found: list[fx.Node] = []
            constants: dict[str, fx.Node] = {}
            for t in range(n_steps) if direction == 0 else reversed(range(n_steps)):
                recurrent = self.call(aten.linear.default, state[0], w_hh, b_hh)
                given = self.call(operator.getitem, steps, t)
                state = _LAYERS[self.node.target](self.call, given, state, recurrent, constants)
                if projection is not None:
                    state[0] = self.call(aten.linear.default, state[0], projection, None)
                found.append(state[0])
            outputs.append(self.call(aten.stack.default, found if direction == 0 else found[::-1], time))
            last.append(state)
        joined = [self.call(aten.stack.default, list(parts), 0) for parts in zip(*last, strict=True)]
        return (outputs[0] if n_directions == 1 else self.call(aten.cat.default, outputs, -1)), joined

    def _fixed(self, x: fx.Node, time: int) -> int:
        size = x.meta["val"].shape[time]
        if isinstance(size, int):
            return size
        reason = (
            "noise reaches a recurrent layer whose number of steps is the batch dimension, which varies; "
            "let the model take [batch, time, ...]"
        )
        raise MissingRuleError([place_of(self.node, reason)])


def _carries(node: fx.Node) -> bool:
    rule = RULES.find(node.target)
    return rule is None or rule.role is not Role.SHAPE


def _kind(value: Any) -> Any:
    """Return what decides about the shapes and types of whatever is computed from a value."""
    if isinstance(value, (list, tuple)):
        return [_kind(v) for v in value]
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else value
