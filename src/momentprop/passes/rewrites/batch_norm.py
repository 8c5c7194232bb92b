"""Folds batch norm behind a linear layer or a convolution into its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import CONVOLUTIONS
from momentprop.graph.schema import bind, has_running_statistics
from momentprop.passes.runner import Pass

aten = torch.ops.aten


def fold_batch_norm(norm: fx.Node, edit: Editor) -> fx.Node | None:
    """s (W x + b - m) + beta = (s W) x + (s (b - m) + beta), with s = gamma / sqrt(v + eps) per channel."""
    layer, gamma, beta, mean, variance, _, _, eps, _ = norm.args
    if not has_running_statistics(norm) or not isinstance(layer, fx.Node) or not _can_take(layer, norm):
        return None
    arguments = bind(layer.target, layer.args, layer.kwargs)  # type: ignore[arg-type]
    weight, bias = arguments["weight"], arguments["bias"]
    with edit.at(layer):  # messages about the weights are about the layer
        scale = edit.op(aten.rsqrt.default, edit.op(aten.add.Scalar, variance, eps))
        if gamma is not None:
            scale = edit.op(aten.mul.Tensor, scale, gamma)
        column = [-1, *[1] * (_weight_of(layer).dim() - 1)]
        factor = edit.op(aten.reshape.default, scale, column)
        arguments["weight"] = edit.op(aten.mul.Tensor, weight, factor)
        shift = mean if bias is None else edit.op(aten.sub.Tensor, mean, bias)
        shift = edit.op(aten.mul.Tensor, shift, scale)
        minus = (aten.neg.default, shift) if beta is None else (aten.sub.Tensor, beta, shift)
        arguments["bias"] = edit.op(*minus)
        names = [a.name for a in layer.target._schema.arguments]  # type: ignore[union-attr]
        return edit.op(layer.target, *[arguments[name] for name in names], value=norm.meta["val"])


def _can_take(layer: fx.Node, norm: fx.Node) -> bool:
    """Say whether the channels of the norm are those of the layer's weights."""
    if len(layer.users) != 1:
        return False
    if layer.target is aten.linear.default:
        return norm.meta["val"].dim() == 2
    return layer.target in CONVOLUTIONS and layer.meta["val"].dim() == _weight_of(layer).dim()


def _weight_of(layer: fx.Node) -> Tensor:
    weight: Any = layer.args[1]
    return weight.meta["val"]


FOLD_BATCH_NORM = Pass((aten.batch_norm.default,).__contains__, fold_batch_norm)
