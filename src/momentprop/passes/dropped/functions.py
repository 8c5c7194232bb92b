"""Makes functions of a value and a mask out of what works element by element behind a dropout."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import (
    DROPOUTS,
    IDENTITIES,
    LIST_VIEWS,
    MOVES,
    SCALING_DROPOUTS,
)
from momentprop.passes.dropped.region import Body, Region
from momentprop.passes.runner import Pass
from momentprop.rules.branches import branches
from momentprop.rules.dropout import Mask

aten = torch.ops.aten

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
    regions = [Region(value, x, edit.varying) for value in _views(dropout)]
    if all(region.is_affine() for region in regions):
        return None
    kind = Mask.inverted(p) if dropout.target in SCALING_DROPOUTS else Mask.alpha(p)
    moved = _Moved(dropout, edit)
    for region in reversed(regions):  # the dropped value itself comes last: what is moved needs it no more
        if region.first is dropout or not region.is_affine():
            _take(region, moved, kind, p, edit)
    return _as_mask(dropout, edit)


def _take(region: Region, moved: _Moved, kind: Mask, p: float, edit: Editor) -> None:
    """Put functions of x and the mask in place of what a region is used for."""
    exits, outside = region.exits(moved.made)
    for node in exits:
        body = Body(region, node)
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


TAKE_DROPPED_FUNCTIONS = Pass(DROPOUTS.__contains__, take_dropped_functions)
