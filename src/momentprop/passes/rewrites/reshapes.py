"""Merges several reshapes in a row into one."""

from __future__ import annotations

import torch
from torch import fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import SAME_ORDER, VIEWS
from momentprop.passes.runner import Pass

aten = torch.ops.aten


def merge_reshapes(view: fx.Node, edit: Editor) -> fx.Node | None:
    """Reshapes keep the elements in row-major order, so of several in a row the last one counts."""
    inner = view.args[0]
    while isinstance(inner, fx.Node) and inner.target in SAME_ORDER:
        inner = inner.args[0]
    if inner is view.args[0]:
        return None
    return edit.op(aten.reshape.default, inner, *view.args[1:], value=view.meta["val"])


MERGE_RESHAPES = Pass(VIEWS.__contains__, merge_reshapes)
