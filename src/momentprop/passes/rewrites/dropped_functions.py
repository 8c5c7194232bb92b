"""Makes functions of a value and a mask out of what works element by element behind a dropout."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from momentprop.graph.edit import Editor
from momentprop.graph.ops import (
    DIFFERENCES,
    DROPOUTS,
    HEADS,
    HOMOGENEOUS,
    IDENTITIES,
    LIST_VIEWS,
    MOVES,
    PRODUCTS,
    QUOTIENTS,
    SCALING_DROPOUTS,
    SUMS,
    is_pointwise,
)
from momentprop.passes.coverage import is_linearized
from momentprop.passes.rewrites.batch_norm import has_running_statistics
from momentprop.passes.runner import Pass
from momentprop.rules.branches import Constant, Link, branches
from momentprop.rules.dropout import Mask
from momentprop.rules.registry import RULES

aten = torch.ops.aten

_RSUBS = (aten.rsub.Tensor, aten.rsub.Scalar)
_AFFINE = (*SUMS, *DIFFERENCES, *PRODUCTS, *QUOTIENTS, *_RSUBS, aten.neg.default, aten.batch_norm.default)
_BY_CHANNEL = (aten.feature_dropout.default, aten.feature_alpha_dropout.default)

_MOVES = ({*MOVES} - {*IDENTITIES}) | {*LIST_VIEWS, aten.unbind.int, aten.slice.Tensor, aten.select.int}


def take_dropped_functions(dropout: fx.Node, edit: Editor) -> fx.Node | None:
    """f(dropout(x)) = g(x, mask) with a mask that is 0 or 1 / (1-p).

    All that depends on nothing but the dropped value and x, element by element, goes along; each of its
    values that is used elsewhere becomes one such function. Where a dropped value is moved (reshaped, cut
    in parts), x and the mask are moved alike. Affine maps have exact rules, and stay.
    """
    x: Any
    x, p, train = dropout.args
    if not train or not isinstance(p, float) or not 0 < p < 1 or x not in edit.varying:
        return None
    regions = [_Region(value, x, edit.varying) for value in _views(dropout)]
    if all(region.is_affine() for region in regions):
        return None
    kind = Mask.inverted(p) if dropout.target in SCALING_DROPOUTS else Mask.alpha(p)
    moved = _Moved(dropout, edit)
    for region in reversed(regions):  # the dropped value itself comes last: what is moved needs it no more
        if region.first is dropout or not region.is_affine():
            _take(region, moved, kind, p, edit)
    return _as_mask(dropout, edit)


def _take(region: _Region, moved: _Moved, kind: Mask, p: float, edit: Editor) -> None:
    """Put functions of x and the mask in place of what a region is used for."""
    exits, outside = region.exits(moved.made)
    for node in exits:
        body = _Body(region, node)
        rule = branches(body.name, body.function(), kind, p, body.uses_x, body.chain())
        with edit.at(node.next if node is region.first else node):
            x, mask = moved.x(region.first), moved.mask(region.first)
            value = edit.op(rule, x, mask, *body.constants, value=node.meta["val"], place=node)
        node.replace_all_uses_with(value, delete_user_cb=outside.__contains__)
    for node in reversed(region.behind):
        if not node.users and node not in edit.erased:
            edit.erase(node)


def _as_mask(dropout: fx.Node, edit: Editor) -> fx.Node:
    """Let a dropout drop ones. One for every channel is enough where it drops channels."""
    x: Any = dropout.args[0]
    with edit.at(dropout):
        if dropout.target in _BY_CHANNEL:
            for d in range(2, x.meta["val"].dim()):
                x = edit.op(aten.slice.Tensor, x, d, 0, 1)
        ones = edit.op(aten.ones_like.default, x)
    if dropout.target not in SCALING_DROPOUTS:
        dropout.target = aten.dropout.default
    dropout.args = (ones, *dropout.args[1:])
    dropout.meta["val"] = ones.meta["val"]
    return dropout


def _views(dropout: fx.Node) -> list[fx.Node]:
    """List the dropped value and what it looks like where its elements are moved."""
    found, pending = [dropout], [dropout]
    while pending:
        for user in pending.pop().users:
            if user.target in _MOVES or user.target is operator.getitem:
                pending.append(user)
                if isinstance(user.meta["val"], Tensor):
                    found.append(user)
    return found


class _Moved:
    """Moves x and the mask as a dropped value is moved."""

    def __init__(self, dropout: fx.Node, edit: Editor) -> None:
        self.dropout, self.edit = dropout, edit
        self.made: set[fx.Node] = set()

    def x(self, view: fx.Node) -> Any:
        return self._moved(view, self.dropout.args[0])

    def mask(self, view: fx.Node) -> Any:
        if view is self.dropout or self.dropout.target not in _BY_CHANNEL:
            return self._moved(view, self.dropout)
        x: Any = self.dropout.args[0]
        wide = self.edit.op(aten.expand_as.default, self.dropout, x, value=x.meta["val"])
        self.made.add(wide)
        return self._moved(view, wide)

    def _moved(self, view: fx.Node, value: Any) -> Any:
        steps = []
        while view is not self.dropout:
            steps.append(view)
            view = view.args[0]  # type: ignore[assignment]
        for step in reversed(steps):
            value = self.edit.op(
                step.target, value, *step.args[1:], value=step.meta["val"], place=step, **step.kwargs
            )
            self.made.add(value)
        return value


class _Region:
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
        arguments = pytree.tree_leaves((node.args, node.kwargs))
        return [n for n in arguments if isinstance(n, fx.Node) and n in self.varying]

    def is_affine(self) -> bool:
        """Say whether rules are exact: of affine maps, and of ReLU, which moves in front of dropout."""
        last, early = self.first, {self.first}
        while len(last.users) == 1 and (user := next(iter(last.users))).target in HOMOGENEOUS:
            last = user
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


class _Body:
    """One value of a region as a function of the dropped value, x and constants."""

    def __init__(self, region: _Region, last: fx.Node) -> None:
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
        if rule is None or len(varying) != 1 or not (is_affine(node, varying) or is_linearized(node, rule)):
            return None
        if not rule.elementwise and node.target not in _AFFINE:
            return None
        at = next((i for i, value in enumerate(node.args) if value is varying[0]), None)
        if at is None:
            return None
        filled = [self._plain(value) for value in node.args]
        kwargs = tuple((name, self._plain(value)) for name, value in node.kwargs.items())
        return Link(rule, tuple(filled[:at]), tuple(filled[at + 1 :]), kwargs)

    def _plain(self, value: Any) -> Any:
        return Constant(self.constants.index(value)) if value in self.constants else value


TAKE_DROPPED_FUNCTIONS = Pass(DROPOUTS.__contains__, take_dropped_functions)
