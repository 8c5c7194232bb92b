"""The backward sweep: the outputs' covariance, as a sum over all sources of noise.

To first order (local.py) the network is made of linear maps, gains and independent sources of noise. With
J_s = d(outputs) / d(source s),

    Cov(outputs) = sum over s of  J_s diag(noise_s) J_s^T.

The forward sweep computes moments and remembers, for every operator, its transposed map and its noise. The
backward sweep carries one cotangent per output from the outputs to the sources, all of them at once as
a tensor [K, *shape], and adds up. Two paths from one source add in J_s before it is squared: residual
connections, concatenation, shared weights and overlapping windows need no care.

Operators that act element by element are merged on the way: gains multiply, noises add up, and the sweep
back meets one step where the network has batch norm, ReLU and dropout in a row.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from momentprop.derive import DerivedGain, derive_gain
from momentprop.errors import CovarianceError
from momentprop.gaussian import safe_sqrt
from momentprop.jump import Jump, find_jump
from momentprop.local import Elementwise, Linear, Local
from momentprop.moments import Moments, is_moments
from momentprop.registry import RULES, Rule
from momentprop.samples import Layout
from momentprop.selection import Selection
from momentprop.trace import Trace, place_of
from momentprop.tracking import Tracked, tracked_layers

Cotangent = Any  # a tensor [K, *shape]; for a value that is a list, {position: tensor}


@dataclass
class _Pending:
    """A value as gain * root + noise, not yet a step of its own; without a root it is noise alone."""

    root: str | None
    gain: Any = None
    noise: Tensor | None = None

    def then(self, local: Elementwise) -> _Pending:
        noise = self.noise
        if noise is not None and local.gain is not None:
            noise = local.gain * local.gain * noise
        if local.noise is not None:
            noise = local.noise if noise is None else noise + local.noise
        gain = None if self.root is None else _times(self.gain, local.gain)
        return _Pending(self.root, gain, noise)


@dataclass
class _Step:
    """The value `out` to first order: a linear map of the values `inputs`, plus noise."""

    out: str
    inputs: list[str]
    local: Linear
    length: int | None = None  # of a value that is a list


class Tape:
    """What the forward sweep leaves for the backward sweep. Values go by the names of their nodes."""

    def __init__(self) -> None:
        self.pending: dict[str, _Pending] = {}
        self.steps: list[_Step] = []

    def record(self, name: str, inputs: list[str], local: Local, shared: bool, length: int | None) -> None:
        """A new value, computed from these random ones."""
        if isinstance(local, Elementwise):
            before = self.pending[inputs[0]] if inputs else _Pending(None)
            self.pending[name] = before.then(local)
            if shared:
                self.settle(name)
            return
        for value in inputs:
            self.settle(value)
        # its noise waits: noises of element-by-element operators behind it will join it
        mapped = f"{name}'"
        noise = None if length is not None else local.noise
        self.steps.append(
            _Step(name if noise is None else mapped, inputs, replace(local, noise=None), length)
        )
        self.pending[name] = _Pending(name) if noise is None else _Pending(mapped, noise=noise)
        if shared:
            self.settle(name)

    def settle(self, name: str) -> None:
        """Make a step of a value that several operators use, or that a linear map takes."""
        value = self.pending[name]
        if value.root == name:
            return
        gain, noise = value.gain, value.noise
        if isinstance(gain, Tensor) and noise is not None and gain.shape == noise.shape:
            # written out here, or compilers evaluate both once more for every output
            gain, noise = torch.stack([gain, noise])
        inputs = [] if value.root is None else [value.root]
        local = Linear(lambda cotangent: [_times(cotangent, gain)], noise)
        self.steps.append(_Step(name, inputs, local))
        self.pending[name] = _Pending(name)

    def covariance(self, seeds: dict[str, Tensor], layouts: Mapping[str, Layout], batch: Any) -> Tensor:
        """[batch, K, K], from the cotangents [K, *shape] of the outputs."""
        cotangents: dict[str, Cotangent] = dict(seeds)
        total: Any = 0.0
        for step in reversed(self.steps):
            cotangent = cotangents.pop(step.out, None)
            if cotangent is None:
                continue  # no output depends on it
            local = step.local
            if local.noise is not None:
                total = total + _scattered(cotangent, local.noise, layouts[step.out], batch)
            if local.spread is not None:
                layout = layouts[step.out.rstrip("'")]
                total = total + _outer(layout.split(local.spread(cotangent), batch))
            if step.length is not None:
                cotangent = [cotangent.get(i) for i in range(step.length)]
            if step.inputs:
                for name, pulled in zip(step.inputs, local.pull(cotangent), strict=False):
                    if pulled is not None:
                        cotangents[name] = _plus(cotangents.get(name), pulled)
        if not isinstance(total, Tensor):  # no noise reaches an output
            rows = next(iter(seeds.values()))
            return rows.new_zeros(batch, rows.shape[0], rows.shape[0])
        return (total + total.mT) / 2


def _scattered(cotangent: Tensor, noise: Tensor, layout: Layout, batch: Any) -> Tensor:
    """sum over elements of c_k noise c_l, per sample."""
    if noise.dim() > 3 and layout.whole:
        # images with their channels last, as convolutions leave them: the order of a sum's terms is free
        cotangent, noise = cotangent.movedim(2, -1), noise.movedim(1, -1)
    if cotangent.shape[0] == 1:
        return layout.split(cotangent * cotangent * noise, batch).sum(-1, keepdim=True)
    return _outer(layout.split(cotangent * safe_sqrt(noise), batch))


def _outer(rows: Tensor) -> Tensor:
    return torch.bmm(rows, rows.mT)


def _times(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return first * second


def _plus(first: Cotangent | None, second: Cotangent) -> Cotangent:
    if first is None:
        return second
    if isinstance(second, dict):
        return first | {i: _plus(first.get(i), c) for i, c in second.items()}
    return first + second


@dataclass(frozen=True)
class _Ref:
    """Stands for the value of a node."""

    name: str


@dataclass(frozen=True)
class _Call:
    """A node of the graph, as the forward sweep needs it."""

    name: str
    target: Any  # a rule, or a function of plain values
    args: tuple[Any, ...]  # plain containers, with _Ref in place of nodes
    kwargs: dict[str, Any]
    inputs: list[str]  # names of the nodes among the arguments, in order, with repetitions
    shared: bool  # several operators use it
    gain: DerivedGain | None = None  # where its rule does not give one


class TwoSweeps(nn.Module):
    """A program like that of propagate.py, program(*state, *inputs) -> flat outputs, with covariances."""

    def __init__(
        self, trace: Trace, random: set[fx.Node], layouts: Mapping[str, Layout], selection: Selection
    ) -> None:
        super().__init__()
        mixed = [node for node in trace.graph.nodes if node in random and node.name not in layouts]
        if mixed:
            raise CovarianceError(
                "the covariance of one sample's outputs is not defined where samples of the batch share "
                f"noise or influence each other, or where the batch size is fixed:\n  {place_of(mixed[0])}"
            )
        self.layouts = dict(layouts)
        self.selection = selection
        nodes = list(trace.graph.nodes)
        self.placeholders = [n.name for n in nodes if n.op == "placeholder"]
        self.outputs = [_Ref(v.name) if isinstance(v, fx.Node) else v for v in nodes[-1].args[0]]
        uncertain = [v for v in nodes[-1].args[0] if isinstance(v, fx.Node) and v in random]
        self.n_outputs = sum(selection.count(layouts[v.name].size) for v in uncertain)
        self.calls = _calls(trace, random)

    def forward(self, *values: Any) -> list[Any]:
        env = dict(zip(self.placeholders, values, strict=True))
        tape = Tape()
        for name, value in env.items():
            if is_moments(value):
                tape.record(name, [], Elementwise(noise=value.variance), True, None)
        directions: dict[str, Tensor] = {}
        for call in self.calls:
            args, kwargs = _filled(call.args, env), _filled(call.kwargs, env)
            out: Any
            if isinstance(call.target, Tracked) and is_moments(args[0]):
                x, weight, bias = args
                out, directions[call.name] = call.target(x, weight, bias, directions.get(call.inputs[0]))
            else:
                out = call.target(*args, **kwargs)
            env[call.name] = out
            first = out[0] if isinstance(out, (list, tuple)) and len(out) else out
            if not is_moments(first):
                continue
            inputs = [name for name in call.inputs if _is_random(env[name])]
            local = self._linearize(call, out, args, kwargs)
            if isinstance(local, Elementwise) and inputs and inputs[0] in directions:
                directions[call.name] = _times(directions[inputs[0]], local.gain)
            length = None if first is out else len(out)
            tape.record(call.name, inputs, local, call.shared, length)
        outputs = [env[v.name] if isinstance(v, _Ref) else v for v in self.outputs]
        names = [v.name if isinstance(v, _Ref) else "" for v in self.outputs]
        return _with_covariance(outputs, names, tape, self.layouts, self.selection)

    def _linearize(self, call: _Call, out: Any, args: Any, kwargs: Any) -> Local:
        if call.gain is not None:
            return call.gain(out, args, kwargs)
        if isinstance(call.target, (Rule, Jump)) and call.target.local is not None:
            return call.target.local(out, *args, **kwargs)
        if isinstance(call.target, Tracked):
            return call.target.local(args[1])
        assert call.target is operator.getitem
        return Linear(lambda cotangent: [{args[1]: cotangent}])


def _calls(trace: Trace, random: set[fx.Node]) -> list[_Call]:
    """The graph as calls of rules, with jumps in place of the dropout, dense layer and activation."""
    nodes = [node for node in trace.graph.nodes if node.op in ("call_function", "get_attr")]
    jumps = {node: found for node in nodes if node in random and (found := find_jump(node)) is not None}
    fused = {node for found in jumps.values() for node in found}
    tracked = tracked_layers(trace.graph, random)
    return [
        _jump(node, *jumps[node]) if node in jumps else _call(node, trace.root, random, node in tracked)
        for node in nodes
        if node not in fused
    ]


def _call(node: fx.Node, root: nn.Module, random: set[fx.Node], tracked: bool) -> _Call:
    if node.op == "get_attr":
        value = getattr(root, str(node.target))
        return _Call(node.name, lambda: value, (), {}, [], False)
    target: Any = RULES.find(node.target, "accurate") or node.target
    inputs = [v.name for v in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(v, fx.Node)]
    gain = None
    if isinstance(target, Rule) and target.local is None and not target.ignores_values and node in random:
        gain = derive_gain(node, target, random)
    args, kwargs = _plain(node.args), _plain(node.kwargs)
    if tracked:
        target, args = Tracked(), (*args, None)[:3]
    return _Call(node.name, target, args, kwargs, inputs, len(node.users) > 1, gain)


def _jump(activation: fx.Node, dropout: fx.Node, layer: fx.Node) -> _Call:
    rule = RULES.find(activation.target, "accurate")
    assert rule is not None
    weight, bias = layer.args[1], layer.args[2] if len(layer.args) > 2 else None
    args = _plain((dropout.args[0], dropout.args[1], weight, bias))
    inputs = [str(dropout.args[0])]  # its name
    return _Call(activation.name, Jump(rule), args, {}, inputs, len(activation.users) > 1)


def _plain(value: Any) -> Any:
    """Arguments of a node in plain containers, which compilers know, with _Ref in place of nodes."""
    if isinstance(value, fx.Node):
        return _Ref(value.name)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value] if isinstance(value, list) else tuple(map(_plain, value))
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _filled(value: Any, env: Mapping[str, Any]) -> Any:
    """The same with the nodes' values."""
    if isinstance(value, _Ref):
        return env[value.name]
    if isinstance(value, tuple):
        return tuple([_filled(v, env) for v in value])
    if isinstance(value, list):
        return [_filled(v, env) for v in value]
    return {k: _filled(v, env) for k, v in value.items()} if isinstance(value, dict) else value


def _is_random(value: Any) -> bool:
    return is_moments(value) or (isinstance(value, (list, tuple)) and any(map(is_moments, value)))


def _with_covariance(
    outputs: list[Any], names: list[str], tape: Tape, layouts: Mapping[str, Layout], selection: Selection
) -> list[Any]:
    """The outputs with covariances; all of them are swept together."""
    random = {name: out for name, out in zip(names, outputs, strict=True) if is_moments(out)}
    if not random:
        return outputs
    chosen = {name: selection.of(out, layouts[name]) for name, out in random.items()}
    rows = [seeds.shape[0] for seeds, _ in chosen.values()]
    seeds, start = {}, 0
    for (name, (block, _)), count in zip(chosen.items(), rows, strict=True):
        tape.settle(name)
        seeds[name] = block
        if len(rows) > 1:
            above, below = (
                block.new_zeros(start, *block.shape[1:]),
                block.new_zeros(sum(rows) - start - count, *block.shape[1:]),
            )
            seeds[name] = torch.cat([above, block, below])
        start += count
    first = next(iter(random))
    total = tape.covariance(seeds, layouts, layouts[first].batch_of(random[first].mean))
    blocks, start = {}, 0
    for (name, (_, indices)), count in zip(chosen.items(), rows, strict=True):
        blocks[name] = (total[:, start : start + count, start : start + count], indices)
        start += count
    return [
        _completed(out, *blocks[name], layouts[name]) if name in blocks and is_moments(out) else out
        for name, out in zip(names, outputs, strict=True)
    ]


def _completed(out: Moments, covariance: Tensor, indices: Tensor | None, layout: Layout) -> Moments:
    """The forward sweep's variance gives way to the covariance's diagonal."""
    diagonal = covariance.flatten(1)[:, :: covariance.shape[1] + 1]
    if indices is not None:
        diagonal = layout.samples(out.variance).scatter(1, indices, diagonal)
    return Moments(out.mean, layout.restored(diagonal, out.mean), covariance, indices)
