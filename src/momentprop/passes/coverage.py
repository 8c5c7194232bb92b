"""graph + registry -> which nodes are random, and every one of them that has no rule."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.capture.trace import place_of
from momentprop.errors import Place
from momentprop.graph.private import HigherOrderOperator, OpOverload
from momentprop.graph.schema import bind
from momentprop.passes.linear_parts import is_linearized
from momentprop.rules.registry import Lookup, Role, Rule

FALLBACK, RULE = "fallback", "rule"  # what a node's meta says: unsupported.py


@dataclass
class Coverage:
    """What noise reaches, and what has no rule there."""

    random: set[fx.Node] = field(default_factory=set)
    sources: list[fx.Node] = field(default_factory=list)
    missing: dict[fx.Node, str] = field(default_factory=dict)  # node -> reason

    @property
    def places(self) -> list[Place]:
        return [place_of(node, reason) for node, reason in self.missing.items()]


def analyze(graph: fx.Graph, rules: Lookup, random_inputs: Iterable[fx.Node] = ()) -> Coverage:
    """Follow the noise of dropouts and of uncertain inputs through the graph."""
    coverage = Coverage(random=set(random_inputs))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        rule = None if FALLBACK in node.meta else rules.find(node.target)
        creates = creates_noise(node)
        if creates:
            coverage.sources.append(node)
        inputs = coverage.random.intersection(node.all_input_nodes)
        if not (creates or inputs):
            continue
        if not _is_known(node, rule):
            coverage.random.add(node)
        if FALLBACK in node.meta:
            continue
        reason = _reason(node, rule, creates, coverage.random, rules)
        if reason is not None:
            coverage.missing[node] = reason
    return coverage


def rule_of(node: fx.Node, rules: Lookup) -> Rule | None:
    """The rule of a node's operator, or one that was made for this node alone."""
    return node.meta.get(RULE) or rules.find(node.target)


def _is_known(node: fx.Node, rule: Rule | None) -> bool:
    """Whether a value is deterministic although its inputs are not: its shape, or an index."""
    if node.target is operator.getitem or FALLBACK in node.meta:
        value = node.meta.get("val")
        leaves = value if isinstance(value, (list, tuple)) else [value]
        return value is not None and not any(isinstance(v, Tensor) and _is_number(v) for v in leaves)
    return rule is not None and rule.role is Role.SHAPE


def _is_number(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def creates_noise(node: fx.Node) -> bool:
    """A seeded random operator that is switched on: its probability is not 0, its training flag set."""
    op = node.target
    if isinstance(op, HigherOrderOperator):
        return any(creates_noise(inner) for graph in _subgraphs(node) for inner in graph.nodes)
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    arguments = bind(op, node.args, node.kwargs)
    off = any(arguments.get(name) == 0 for name in ("p", "dropout", "dropout_p"))
    return not off and all(arguments.get(name) is not False for name in ("train", "training"))


def _subgraphs(node: fx.Node) -> list[fx.Graph]:
    """The graphs that a control-flow operator runs."""
    root = node.graph.owning_module
    targets = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    modules = [getattr(root, target, None) for target in targets]
    return [module.graph for module in modules if isinstance(module, fx.GraphModule)]


def _reason(
    node: fx.Node, rule: Rule | None, creates: bool, random: set[fx.Node], rules: Lookup
) -> str | None:
    """Why this node cannot be propagated; None if it can."""
    if node.target is operator.getitem:
        return None
    if rule is None:
        return "draws random numbers and has no rule" if creates else "has no rule"
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


def _holds(value: Any, nodes: set[fx.Node]) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(value, lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return any(n in nodes for n in found)
