"""Finds what noise reaches, every operator among that which has no rule, and rules without a linear part."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from momentprop.errors import Place
from momentprop.graph.place import place_of
from momentprop.graph.reach import creates_noise, is_number, reach, values_of
from momentprop.graph.schema import bind
from momentprop.moments import Moments
from momentprop.rules.registry import Lookup, Role, Rule

FALLBACK, RULE = "fallback", "rule"  # what a node's meta says: stand_ins/unsupported.py
_DRAWS = (
    "draws random numbers and has no rule. If it belongs to training alone, such as augmentation, "
    "leave it out by dropout=nn.Dropout, or by whatever else names the dropouts that count"
)
QUADRATURE = "quadrature"  # a fallback that nobody has to ask for
_LINEAR: WeakKeyDictionary[Rule, bool] = WeakKeyDictionary()  # a rule answers alike wherever it is used


@dataclass(frozen=True)
class Coverage:
    """Holds what noise reaches, and what has no rule there."""

    random: set[fx.Node]
    sources: list[fx.Node]
    missing: dict[fx.Node, str]  # node -> reason

    @property
    def places(self) -> list[Place]:
        """Return the places of operators without a rule, for messages."""
        return [place_of(node, reason) for node, reason in self.missing.items()]


def analyze(graph: fx.Graph, rules: Lookup, random_inputs: Iterable[fx.Node] = ()) -> Coverage:
    """Follow the noise of dropouts and of uncertain inputs through the graph."""
    random = reach(
        graph, random_inputs, creates_noise, lambda node: not _is_known(node, rules), brings=values_of
    )
    sources = [node for node in graph.nodes if node.op == "call_function" and creates_noise(node)]
    drawing = set(sources)
    missing: dict[fx.Node, str] = {}
    for node in graph.nodes:
        concerned = node in drawing or not random.isdisjoint(node.all_input_nodes)
        if node.op == "call_function" and concerned and FALLBACK not in node.meta:
            reason = _reason(node, node in drawing, random, rules)
            if reason is not None:
                missing[node] = reason
    return Coverage(random, sources, missing)


def rule_of(node: fx.Node, rules: Lookup) -> Rule | None:
    """The rule of a node's operator, or one that was made for this node alone."""
    return node.meta.get(RULE) or rules.find(node.target)


def _is_known(node: fx.Node, rules: Lookup) -> bool:
    """Say whether a value is deterministic although its inputs are not: a shape, or an index."""
    if node.target is operator.getitem or FALLBACK in node.meta:
        value = node.meta.get("val")
        leaves = value if isinstance(value, (list, tuple)) else [value]
        return value is not None and not any(is_number(v) for v in leaves)
    rule = rules.find(node.target)
    return rule is not None and rule.role is Role.SHAPE


def _reason(node: fx.Node, creates: bool, random: set[fx.Node], rules: Lookup) -> str | None:
    """Say why this node cannot be propagated; None if it can."""
    if node.target is operator.getitem:
        return None
    rule = rules.find(node.target)
    if node.target is torch.ops.higher_order.wrap_with_autocast:
        return (
            "noise is not followed into torch.autocast; moments are computed in the type of the weights, so "
            "convert the model without it (enabled=False)"
        )
    if rule is None:
        return _DRAWS if creates else "has no rule"
    if rule.role is Role.SHAPE and any(_is_value(user) for user in node.users):
        return "only its indices have a rule, and its values are used"
    if creates and not rule.role.creates_noise:
        return "draws random numbers, which its rule does not cover"
    if rules.linear and not (rule.elementwise or is_linearized(node, rule)):
        return (
            "its rule does not say how it acts on deviations; give it elementwise=True or return Propagated"
        )
    if rule.refuses is None:
        return None
    arguments = bind(rule.op, node.args, node.kwargs)
    return rule.refuses(arguments, frozenset(k for k, v in arguments.items() if _holds(v, random)))


def _is_value(user: fx.Node) -> bool:
    """Say whether a node takes numbers, and not indices, out of several results."""
    return user.target is operator.getitem and is_number(user.meta.get("val"))


def _holds(value: object, nodes: set[fx.Node]) -> bool:
    return any(isinstance(leaf, fx.Node) and leaf in nodes for leaf in pytree.tree_leaves(value))


def is_linearized(node: fx.Node, rule: Rule) -> bool:
    """Say whether the rule tells how deviations pass the node: it is asked, on tensors without values."""
    if rule.role is Role.SHAPE:
        return True
    if rule not in _LINEAR:
        _LINEAR[rule] = _asked(node, rule)
    return _LINEAR[rule]


def _asked(node: fx.Node, rule: Rule) -> bool:
    def value(n: fx.Node) -> Any:
        return pytree.tree_map_only((Tensor, torch.SymInt), _example, n.meta.get("val"))

    def moments(n: fx.Node) -> Any:
        return pytree.tree_map_only(Tensor, _random, value(n))

    try:
        with torch.no_grad():
            first = fx.map_arg(node.args[:1], moments)
            rest, kwargs = fx.map_arg((node.args[1:], node.kwargs), value)
            return rule.propagate(*first, *rest, **kwargs).linearize is not None
    except Exception:  # whatever is wrong shows when its gain is derived, or when the network runs
        return not (rule.elementwise and node.args and isinstance(node.args[0], fx.Node))


def _example(value: Any) -> Any:
    """Stand in for what was traced, with the sizes of the example inputs and without values."""
    if isinstance(value, Tensor):
        return torch.empty([_size(n) for n in value.shape], dtype=value.dtype, device="meta")
    return _size(value)


def _size(size: Any) -> int:
    hint = size if isinstance(size, int) else size.node.hint
    return 2 if hint is None else int(hint)


def _random(value: Tensor) -> Any:
    return Moments(value, torch.ones_like(value)) if value.is_floating_point() else value
