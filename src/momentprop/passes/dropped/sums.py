"""Joins dropout and what divides by sums over its values behind it: softmax, layer norm, RMS norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from momentprop.graph.edit import Editor
from momentprop.graph.schema import bind
from momentprop.passes.dropped.shift import Dropped
from momentprop.passes.runner import Pass

aten = torch.ops.aten

_SOFTMAXES = (aten.softmax.int, aten.log_softmax.int)
_SIZES = range(6, 256)  # sums over fewer are nothing like normal; norms of more are nearly linear anyway
_NORMS = (aten.layer_norm.default, aten.rms_norm.default)


def join_softmax(node: fx.Node, edit: Editor) -> fx.Node | None:
    """softmax(dropout(x)) as one operator. Outputs that are made of logits stay, with their logits."""
    given = bind(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    size = given["self"].meta["val"].shape[given["dim"]]
    if given["dtype"] is not None or any(user.op == "output" for user in node.users):
        return None
    found = Dropped.behind(given["self"])
    if found is None or not isinstance(size, int) or size < 2:
        return None
    log = node.target is aten.log_softmax.int
    op = torch.ops.momentprop.dropped_softmax.default
    arguments = found.drop_probability, given["dim"], log  # a shift of all logits is none
    return edit.op(op, found.x(edit), *arguments, value=node.meta["val"])


def join_norm(node: fx.Node, edit: Editor) -> fx.Node | None:
    """layer_norm(dropout(x)) as one operator, weight and bias by themselves; RMS norm too."""
    given = bind(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    center, shape = node.target is aten.layer_norm.default, given["normalized_shape"]
    value: Any = node.meta["val"]
    found = Dropped.behind(given["input"])
    if found is None or not (center or found.shift == 0):
        return None
    if not all(isinstance(size, int) for size in shape) or math.prod(shape) not in _SIZES:
        return None
    eps = torch.finfo(value.dtype).eps if given["eps"] is None else given["eps"]
    op = torch.ops.momentprop.dropped_norm.default
    out = edit.op(op, found.x(edit), found.drop_probability, shape, center, eps, value=value)
    for then, parameter in ((aten.mul.Tensor, given["weight"]), (aten.add.Tensor, given.get("bias"))):
        out = out if parameter is None else edit.op(then, out, parameter, value=value)
    return out


JOIN_DROPPED_SOFTMAX = Pass(_SOFTMAXES.__contains__, join_softmax)
JOIN_DROPPED_NORM = Pass(_NORMS.__contains__, join_norm)
