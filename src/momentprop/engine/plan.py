"""The traced graph as a list of steps: what is random and what is swept is known before any number is."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from momentprop.capture.trace import Trace
from momentprop.engine.cut import Cut, frontier
from momentprop.engine.derive import derived
from momentprop.engine.fused import Finder, Fused, Operator
from momentprop.engine.heads import Head
from momentprop.errors import Place
from momentprop.graph.ops import HEADS
from momentprop.graph.place import place_of
from momentprop.graph.reach import creates_noise, reach
from momentprop.passes.coverage import rule_of
from momentprop.rules.facts import Unexplained
from momentprop.rules.linearization import Propagated, mapped
from momentprop.rules.registry import Lookup, Role


@dataclass(frozen=True)
class Ref:
    """Stands for the value of a node."""

    name: str


@dataclass(frozen=True, eq=False)
class Step:
    """A node of the graph, as the engine needs it."""

    name: str
    plain: Callable[..., Any]  # the operator itself
    operator: Operator | None  # None where nothing random comes in or out
    args: tuple[Any, ...]  # plain containers, with Ref in place of nodes
    kwargs: dict[str, Any]
    random: bool
    inputs: tuple[str, ...]  # the random ones, in the order of the arguments, with repetitions
    swept: bool  # the backward sweep goes through it
    at_frontier: bool  # the backward sweep ends here: it counts as a source of noise
    shared: bool  # several operators use it
    length: int | None  # of a value that is a list
    place: Place
    last_use_of: tuple[str, ...] = ()  # values that nothing needs behind it

    def filled(self, env: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the nodes' values."""
        return _filled(self.args, env), _filled(self.kwargs, env)


@dataclass(frozen=True, eq=False)
class Plan:
    """A graph and what is random in it, ready to run."""

    steps: tuple[Step, ...]
    placeholders: tuple[str, ...]
    uncertain: tuple[str, ...]  # inputs that are given as moments
    outputs: tuple[Any, ...]  # Ref, or a constant
    random: frozenset[str]  # names of random values
    heads: Mapping[str, Head]  # outputs that are a softmax or the like
    only_masks: bool  # no noise but that of dropout masks


def make_plan(
    trace: Trace,
    random: Collection[fx.Node],
    rules: Lookup,
    *,
    cut: Cut | None = None,
    fusions: Sequence[Finder] = (),
    conditioned: Sequence[fx.Node] = (),
    kept: Collection[str] = (),
    heads: bool = True,
) -> Plan:
    """The plan of a trace.

    `fusions` find operators that take the place of rules. `conditioned` are sources of noise that count as
    constants here, because somebody else takes care of them. `kept` are values that are needed after the
    last step. With `heads` those at the outputs are known as such.
    """
    random = _without(trace.graph, random, conditioned)
    region = set() if cut is None else cut.region(trace.graph, random)
    ends = frontier(trace.graph, region, random) if cut is not None else set()
    fused = _fused(trace.graph, random, region, fusions)
    covered = {node for found in fused.values() for node in found.covers}
    make = _Maker(rules, trace.root, random, region, ends, fused)
    nodes = [n for n in trace.graph.nodes if n.op in ("call_function", "get_attr") and n not in covered]
    output: Any = next(reversed(trace.graph.nodes)).args[0]
    returned = [v for v in output if isinstance(v, fx.Node)]
    found = {v.name: Head.of(v) for v in returned if heads and v in random and v.target in HEADS}
    steps = [make.step(node) for node in nodes]
    roles = [s.operator.role for s in steps if s.random and s.operator is not None]
    uncertain = tuple(n.name for n in trace.input_nodes if n in random)
    return Plan(
        steps=_with_last_uses(
            steps, {*kept, *(v.name for v in returned), *(head.logits for head in found.values())}
        ),
        placeholders=tuple(n.name for n in trace.graph.nodes if n.op == "placeholder"),
        uncertain=uncertain,
        outputs=tuple(Ref(v.name) if isinstance(v, fx.Node) else v for v in output),
        random=frozenset(n.name for n in random),
        heads=found,
        only_masks=not uncertain and not any(role is Role.SOURCE for role in roles),
    )


def _without(
    graph: fx.Graph, random: Collection[fx.Node], conditioned: Sequence[fx.Node]
) -> Collection[fx.Node]:
    """Find what is random if these sources are not."""
    if not conditioned:
        return random
    inputs = [node for node in random if node.op == "placeholder"]
    return reach(
        graph,
        inputs,
        begins=creates_noise,
        carries=lambda node: node in random and node not in conditioned,
    )


def _fused(
    graph: fx.Graph, random: Collection[fx.Node], region: set[fx.Node], fusions: Sequence[Finder]
) -> dict[fx.Node, Fused]:
    """Operators in place of rules, where all nodes they stand for are swept; who finds one first has it."""
    found: dict[fx.Node, Fused] = {}
    for find in fusions:
        for node, fused in find(graph, random).items():
            is_head = node.target in HEADS and any(user.op == "output" for user in node.users)
            if node in found or (is_head and fused.covers):  # its logits are wanted too
                continue
            if region.issuperset((node, *fused.covers)):
                found[node] = fused
    return found


@dataclass(frozen=True, eq=False)
class _Maker:
    """Makes steps of nodes."""

    rules: Lookup
    root: nn.Module
    random: Collection[fx.Node]
    region: set[fx.Node]
    ends: set[fx.Node]
    fused: Mapping[fx.Node, Fused]

    def step(self, node: fx.Node) -> Step:
        plain: Any = node.target
        arguments: Any = (node.args, node.kwargs)
        found: Operator | None = None
        if node.op == "get_attr":
            attribute = getattr(self.root, str(node.target))
            plain, arguments = (lambda: attribute), ((), {})
        elif node in self.fused:
            arguments, found = (self.fused[node].args, {}), self.fused[node].operator
        elif node in self.random and node.target is operator.getitem:
            found = PICK
        elif self._meets_noise(node):
            found = self._operator(node)
        value = node.meta.get("val")
        nodes = [v for v in pytree.tree_leaves(arguments) if isinstance(v, fx.Node)]
        args, kwargs = _plain(arguments)
        return Step(
            name=node.name,
            plain=plain,
            operator=found,
            args=args,
            kwargs=kwargs,
            random=node in self.random,
            inputs=tuple(n.name for n in nodes if n in self.random),
            swept=node in self.region and node in self.random,
            at_frontier=node in self.ends,
            shared=len(node.users) > 1,
            length=len(value) if isinstance(value, (list, tuple)) else None,
            place=place_of(node),
        )

    def _meets_noise(self, node: fx.Node) -> bool:
        if node in self.random or creates_noise(node):  # a source that is conditioned on has its mean
            return True
        return any(n in self.random for n in node.all_input_nodes)

    def _operator(self, node: fx.Node) -> Operator | None:
        rule = rule_of(node, self.rules)
        if rule is None or node not in self.region or rule.role is Role.SHAPE:
            return rule
        return derived(node, rule, self.random)


class Pick:
    """Takes one of several results."""

    role = Role.MAP

    def propagate(self, values: Any, index: int) -> Propagated:
        found = values[index]
        own = found.fact(Unexplained)
        noise = None if own is None else own.noise
        return Propagated(found, lambda: mapped(lambda cotangent: [{index: cotangent}], noise))


PICK = Pick()


def _with_last_uses(steps: Sequence[Step], wanted: set[str]) -> tuple[Step, ...]:
    """Say of every value where it is used last, so that memory is not held until the sweep back."""
    found, seen = [], set(wanted)
    for step in reversed(steps):
        used = [leaf.name for leaf in pytree.tree_leaves((step.args, step.kwargs)) if isinstance(leaf, Ref)]
        mine = tuple(dict.fromkeys(n for n in (*used, step.name) if n not in seen))
        seen.update(mine)
        found.append(dataclasses.replace(step, last_use_of=mine))
    return tuple(found[::-1])


def _plain(value: Any) -> Any:
    """Arguments of a node in plain containers, which compilers know, with Ref in place of nodes."""
    if isinstance(value, fx.Node):
        return Ref(value.name)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value] if isinstance(value, list) else tuple(map(_plain, value))
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _filled(value: Any, env: Mapping[str, Any]) -> Any:
    """The same with the nodes' values."""
    if isinstance(value, Ref):
        return env[value.name]
    if isinstance(value, tuple):
        return tuple([_filled(v, env) for v in value])
    if isinstance(value, list):
        return [_filled(v, env) for v in value]
    return {k: _filled(v, env) for k, v in value.items()} if isinstance(value, dict) else value
