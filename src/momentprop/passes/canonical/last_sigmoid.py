"""Moves a final sigmoid behind what reshapes its result, so that it is known as the network's head."""

from __future__ import annotations

from typing import Any

from torch import fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import SAME_ORDER, aten
from momentprop.passes.runner import Pass


def sigmoid_last(reshape: fx.Node, edit: Editor) -> fx.Node | None:
    """reshape(sigmoid(x)) = sigmoid(reshape(x)): `sigmoid(x).squeeze(1)` ends binary classifiers."""
    sigmoid: Any = reshape.args[0]
    if not isinstance(sigmoid, fx.Node) or sigmoid.target is not aten.sigmoid.default:
        return None
    ends = all(user.op == "output" or user.target in SAME_ORDER for user in reshape.users)
    if len(sigmoid.users) > 1 or not ends or reshape.kwargs:
        return None
    value = reshape.meta["val"]
    moved = edit.op(reshape.target, sigmoid.args[0], *reshape.args[1:], value=value)
    return edit.op(sigmoid.target, moved, place=sigmoid, value=value)


SIGMOID_LAST = Pass(SAME_ORDER.__contains__, sigmoid_last)
