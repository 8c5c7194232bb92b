"""The traced graph as a list of calls: rules, and operators that stand for several nodes in a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from momentprop.capture.trace import HEADS, Trace
from momentprop.engine.derive import DerivedGain, derive_gain
from momentprop.engine.dropped_pool import find_dropped_pool
from momentprop.engine.fused import Fused
from momentprop.engine.jump import find_jump
from momentprop.engine.tracking import Tracked, tracked_layers
from momentprop.passes.coverage import rule_of
from momentprop.rules.registry import Lookup, Role, Rule


@dataclass(frozen=True)
class Ref:
    """Stands for the value of a node."""

    name: str


@dataclass(frozen=True)
class Call:
    """A node of the graph, as the forward sweep needs it."""

    name: str
    target: Any  # a rule, an operator that stands for several, or a function of plain values
    args: tuple[Any, ...]  # plain containers, with Ref in place of nodes
    kwargs: dict[str, Any]
    inputs: list[str]  # names of the nodes among the arguments, in order, with repetitions
    shared: bool  # several operators use it
    plain: Any = None  # the operator itself
    gain: DerivedGain | None = None  # where its rule does not give one
    last_use_of: tuple[str, ...] = ()  # values that nothing needs behind it


def calls(trace: Trace, random: set[fx.Node]) -> list[Call]:
    """The graph as calls of rules, with one operator for some that stand in a row."""
    nodes = [node for node in trace.graph.nodes if node.op in ("call_function", "get_attr")]
    fused = {node: found for node in nodes if node in random and (found := _find_fused(node)) is not None}
    covered = {node for found in fused.values() for node in found.covers}
    tracked = tracked_layers(trace.graph, random)
    return [
        _fused_call(node, fused[node]) if node in fused else _call(node, trace.root, random, node in tracked)
        for node in nodes
        if node not in covered
    ]


def with_last_uses(calls: list[Call], wanted: set[str]) -> list[Call]:
    """Say of every value where it is used last, so that memory is not held until the sweep back."""
    found, seen = [], set(wanted)
    for call in reversed(calls):
        mine = tuple(dict.fromkeys(n for n in (*call.inputs, call.name) if n not in seen))
        seen.update(mine)
        found.append(dataclasses.replace(call, last_use_of=mine))
    return found[::-1]


def forget(names: tuple[str, ...], *tables: dict[str, Any]) -> None:
    for table in tables:
        for name in names:
            table.pop(name, None)


def _find_fused(node: fx.Node) -> Fused | None:
    if node.target in HEADS and any(user.op == "output" for user in node.users):
        return None  # its logits are wanted too
    return find_jump(node) or find_dropped_pool(node)


def _fused_call(last: fx.Node, found: Fused) -> Call:
    return Call(last.name, found.operator, _plain(found.args), {}, _names(found.args), len(last.users) > 1)


def _call(node: fx.Node, root: nn.Module, random: set[fx.Node], tracked: bool) -> Call:
    if node.op == "get_attr":
        value = getattr(root, str(node.target))
        return Call(node.name, lambda: value, (), {}, [], False)
    target: Any = rule_of(node, Lookup(linear=True)) or node.target
    gain = None
    if isinstance(target, Rule) and target.local is None and target.role is not Role.SHAPE and node in random:
        gain = derive_gain(node, target, random)
    args, kwargs = _plain(node.args), _plain(node.kwargs)
    if tracked:
        target, args = Tracked(), (*args, None)[:3]
    inputs = _names((node.args, node.kwargs))
    return Call(node.name, target, args, kwargs, inputs, len(node.users) > 1, node.target, gain)


def _names(arguments: Any) -> list[str]:
    return [v.name for v in pytree.tree_leaves(arguments) if isinstance(v, fx.Node)]


def _plain(value: Any) -> Any:
    """Arguments of a node in plain containers, which compilers know, with Ref in place of nodes."""
    if isinstance(value, fx.Node):
        return Ref(value.name)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value] if isinstance(value, list) else tuple(map(_plain, value))
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def filled(value: Any, env: Mapping[str, Any]) -> Any:
    """The same with the nodes' values."""
    if isinstance(value, Ref):
        return env[value.name]
    if isinstance(value, tuple):
        return tuple([filled(v, env) for v in value])
    if isinstance(value, list):
        return [filled(v, env) for v in value]
    return {k: filled(v, env) for k, v in value.items()} if isinstance(value, dict) else value
