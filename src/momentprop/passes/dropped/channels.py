"""Normalises channels before they are dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from momentprop.graph.edit import Editor
from momentprop.graph.reach import is_lone_dropout
from momentprop.graph.schema import bind
from momentprop.passes.runner import Pass

aten = torch.ops.aten


def drop_normalised_channels(norm: fx.Node, edit: Editor) -> fx.Node | None:
    """instance_norm(channel_dropout(x)) = q channel_dropout(instance_norm(x)) + bias, eps times q^2.

    A kept channel x / q is normalised as x is, but for eps. A dropped one becomes the bias.
    """
    given = bind(norm.target, norm.args, norm.kwargs)  # type: ignore[arg-type]
    dropout: Any = given["input"]
    if not given["use_input_stats"] or not is_lone_dropout(dropout, aten.feature_dropout.default):
        return None
    x, p, _ = dropout.args
    keep, value = 1 - p, norm.meta["val"]
    statistics = None, None, True, given["momentum"]
    flag = given["cudnn_enabled"]
    inner = edit.op(
        aten.instance_norm.default,
        x,
        given["weight"],
        None,
        *statistics,
        given["eps"] * keep**2,
        flag,
        value=value,
    )
    out = edit.op(aten.feature_dropout.default, inner, p, True, place=dropout, value=value)
    out = edit.op(aten.mul.Tensor, out, keep, value=value)
    if given["bias"] is None:
        return out
    bias = edit.op(aten.reshape.default, given["bias"], [-1, *[1] * (value.dim() - 2)])
    return edit.op(aten.add.Tensor, out, bias, value=value)


DROP_NORMALISED_CHANNELS = Pass((aten.instance_norm.default,).__contains__, drop_normalised_channels)
