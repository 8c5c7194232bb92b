"""Recognises dropout that is written as a product with Bernoulli numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import PRODUCTS
from momentprop.passes.runner import Pass

aten = torch.ops.aten


def recognise_dropout(product: fx.Node, edit: Editor) -> fx.Node | None:
    """x B = q dropout(x) for Bernoulli numbers B of probability q, one for each element or channel of x.

    One number for a whole sample is a path that is dropped (engine/paths.py), and stays.
    """
    for x, drawn in (product.args[:2], product.args[1::-1]):
        if isinstance(x, fx.Node) and isinstance(drawn, fx.Node) and drawn.target is aten.bernoulli.p:
            dropout = _dropout_like(x, drawn)
            if dropout is not None and x is not drawn and len(drawn.users) == 1:
                keep: Any = drawn.args[1]
                value = product.meta["val"]
                dropped = edit.op(dropout, x, 1 - keep, True, value=value)
                return edit.op(aten.mul.Tensor, dropped, keep, value=value)
    return None


def _dropout_like(x: fx.Node, drawn: fx.Node) -> Any:
    """Return the dropout whose mask has the shape of these Bernoulli numbers."""
    keep = drawn.args[1] if len(drawn.args) > 1 else None
    one, other = x.meta["val"], drawn.meta["val"]
    shape, mask = ([str(size) for size in value.shape] for value in (one, other))
    if not isinstance(keep, float) or not 0 < keep < 1 or one.dtype != other.dtype:
        return None
    if len(mask) < 2 or all(size == "1" for size in mask[1:]):
        return None
    if mask == shape:
        return aten.dropout.default
    channels = [*shape[:2], *["1"] * (len(shape) - 2)]
    return aten.feature_dropout.default if mask == channels else None


RECOGNISE_DROPOUT = Pass(PRODUCTS.__contains__, recognise_dropout)
