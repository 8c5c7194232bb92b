"""Finds what works element by element on a dropped value, and makes functions of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from momentprop.graph.ops import (
    DIFFERENCES,
    HEADS,
    HOMOGENEOUS,
    IDENTITIES,
    PRODUCTS,
    QUOTIENTS,
    SCALING_DROPOUTS,
    SUMS,
    is_pointwise,
)
from momentprop.graph.schema import has_running_statistics, inputs_of
from momentprop.rules.branches import Constant, Link
from momentprop.rules.registry import RULES

aten = torch.ops.aten

_RSUBS = (aten.rsub.Tensor, aten.rsub.Scalar)
_AFFINE = (*SUMS, *DIFFERENCES, *PRODUCTS, *QUOTIENTS, *_RSUBS, aten.neg.default, aten.batch_norm.default)


class Region:
    """What works element by element on a dropped value, and on the value that is dropped."""

    def __init__(self, first: fx.Node, x: fx.Node, varying: set[fx.Node]) -> None:
        self.first, self.varying = first, varying
        self.x: Any = x if first.args[0] is x else None  # where it has the shape of the dropped value
        self.behind: list[fx.Node] = [first]  # what depends on the dropped value, in order
        self.members: set[fx.Node] = {first} if self.x is None else {first, x}
        pending = [user for member in self.members for user in member.users]
        while pending:
            node = pending.pop()
            if node not in self.members and self._takes(node):
                self.members.add(node)
                if any(n in self.behind for n in node.all_input_nodes):
                    self.behind.append(node)
                pending += node.users

    def _takes(self, node: fx.Node) -> bool:
        inputs = self.inputs_of(node)
        return bool(inputs) and self.members.issuperset(inputs) and self._is_like(node) and _is_function(node)

    def _is_like(self, node: fx.Node) -> bool:
        """Say whether it has a value for each element of x."""
        value, like = node.meta.get("val"), self.first.meta["val"]
        if not isinstance(value, Tensor) or value.dtype not in (like.dtype, torch.bool):
            return False
        return tuple(map(str, value.shape)) == tuple(map(str, like.shape))

    def inputs_of(self, node: fx.Node) -> list[fx.Node]:
        """The arguments that vary, with repetitions."""
        return [n for n in inputs_of(node) if n in self.varying]

    def is_affine(self) -> bool:
        """Say whether rules are exact: of affine maps, and of ReLU, which moves in front of dropout."""
        last, early = self.first, {self.first}
        while self.first.target in SCALING_DROPOUTS and len(last.users) == 1:
            last = next(iter(last.users))
            if last.target not in HOMOGENEOUS:
                break
            early.add(last)
        return all(node in early or is_affine(node, self.inputs_of(node)) for node in self.behind)

    def exits(self, without: set[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
        """Find the values that are used elsewhere, and by whom (and not by these).

        What is true or false is no number: it stays.
        """
        inside, exits = set(self.behind), []
        outside: set[fx.Node] = set()
        for node in reversed(self.behind):
            users = {user for user in node.users if user not in inside or user in outside} - without
            if users and node.meta["val"].dtype is torch.bool:
                outside.add(node)
            elif users:
                exits.append(node)
            outside |= users
        return exits, outside


def _is_function(node: fx.Node) -> bool:
    """Say whether it works element by element. Outputs that are made of logits stay, with their logits."""
    if node.target is aten.batch_norm.default:
        return has_running_statistics(node)
    if node.target in HEADS and any(user.op == "output" for user in node.users):
        return False
    rule = RULES.find(node.target)
    return is_pointwise(node.target) or (rule is not None and rule.elementwise)


def _is_same(node: fx.Node) -> bool:
    """Say whether it returns its argument, which may be a cast to the type that it has."""
    if node.target is aten.to.dtype:
        return node.args[0].meta["val"].dtype == node.meta["val"].dtype  # type: ignore[union-attr]
    return node.target in IDENTITIES


def is_affine(node: fx.Node, varying: list[fx.Node]) -> bool:
    """Say whether an operator is a x + b, element by element, of the one argument that varies."""
    if _is_same(node):
        return True
    return len(varying) == 1 and (
        node.target in _AFFINE and (node.target not in QUOTIENTS or node.args[0] is varying[0])
    )


class Body:
    """One value of a region as a function of the dropped value, x and constants."""

    def __init__(self, region: Region, last: fx.Node) -> None:
        self.region = region
        needed, pending = {last}, [last]
        while pending:
            for n in pending.pop().all_input_nodes:
                if n in region.members and n not in needed:
                    needed.add(n)
                    pending.append(n)
        self.uses_x = False
        first = {region.x, region.first}
        self.nodes = [n for n in last.graph.nodes if n in needed and n not in first]
        self.last = last
        self.constants: list[fx.Node] = []
        for node in self.nodes:
            self.uses_x |= region.x in node.all_input_nodes
            for n in node.all_input_nodes:
                if n not in region.members and n not in self.constants:
                    self.constants.append(n)

    @property
    def name(self) -> str:
        """Return names of its operators that are no affine maps."""
        bent = [n.target for n in self.nodes if not is_affine(n, self.region.inputs_of(n))]
        names = [str(op).removeprefix("aten.").split(".")[0] for op in bent]
        return "_".join(["dropped", *names[:3]])

    def function(self) -> fx.GraphModule:
        """The function itself."""
        graph = fx.Graph()
        env = {self.region.first: graph.placeholder("dropped"), self.region.x: graph.placeholder("x")}
        for i, n in enumerate(self.constants):
            env[n] = graph.placeholder(f"c{i}")
        for node in self.nodes:
            source: Any = node.args[0]
            env[node] = env[source] if _is_same(node) else graph.node_copy(node, env.__getitem__)
        graph.output(env[self.last])
        return fx.GraphModule(torch.nn.Module(), graph, "Branch")

    def chain(self) -> tuple[Link, ...] | None:
        """The rules of its operators in a row, if one of them at most is no affine map."""
        links: list[Link] = []
        if self.uses_x:
            return None
        for node in self.nodes:
            if _is_same(node):
                continue
            link = self._link(node)
            if link is None:
                return None
            links.append(link)
        return tuple(links) if sum(link.rule.elementwise for link in links) <= 1 else None

    def _link(self, node: fx.Node) -> Link | None:
        varying, rule = self.region.inputs_of(node), RULES.find(node.target)
        if rule is None or len(varying) != 1 or not (rule.elementwise or is_affine(node, varying)):
            return None
        at = next((i for i, value in enumerate(node.args) if value is varying[0]), None)
        if at is None:
            return None
        filled = [self._plain(value) for value in node.args]
        kwargs = tuple((name, self._plain(value)) for name, value in node.kwargs.items())
        return Link(rule, tuple(filled[:at]), tuple(filled[at + 1 :]), kwargs)

    def _plain(self, value: Any) -> Any:
        return Constant(self.constants.index(value)) if value in self.constants else value
