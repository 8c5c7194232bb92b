"""Writes operators in ONNX for which torch.onnx.export has no translation of its own, or a wrong one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from momentprop.exports.onnx_moments import ShortMoments
from momentprop.gaussian.composites import DROPPED_VARIANCE, MAX_MOMENTS, RELU_MOMENTS
from momentprop.rules.max_pooling import ALIKE_MAXIMA, RECTIFIED_MAXIMA, TILED_MAXIMA

Translations = dict[Callable[..., Any], Callable[..., Any]]


def stable_translations() -> Translations:
    """Map operators that torch.onnx.export translates inaccurately to translations that are accurate."""
    from onnxscript import opset18

    op: Any = opset18  # typed more narrowly than it works

    def log_sigmoid(x: Any) -> Any:
        """Compute -softplus(-x): log(sigmoid(x)) is minus infinity for x < -104."""
        return op.Neg(op.Softplus(op.Neg(x)))

    def expm1(x: Any) -> Any:
        """Compute 2 t / (1 - t) with t = tanh(x / 2): of exp(x) - 1 nothing is left for small x."""
        t = op.Tanh(op.Mul(x, 0.5))
        return op.Where(op.Less(op.Abs(x), 1.0), op.Div(op.Add(t, t), op.Sub(1.0, t)), op.Sub(op.Exp(x), 1.0))

    def log1p(x: Any) -> Any:
        """Compute log(1 + x) as x log(u) / (u - 1) with u = 1 + x as it is rounded (Kahan)."""
        u = op.Add(x, 1.0)
        whole = op.Sub(u, 1.0)
        is_lost, is_large = op.Equal(whole, 0.0), op.Greater(x, 1.0)
        ratio = op.Where(op.Or(is_lost, is_large), 1.0, op.Div(x, op.Where(is_lost, 1.0, whole)))
        return op.Where(is_lost, x, op.Mul(op.Log(u), ratio))

    aten = torch.ops.aten
    return {
        aten.log_sigmoid.default: log_sigmoid,
        aten.expm1.default: expm1,
        aten.log1p.default: log1p,
    }


def short_translations() -> Translations:
    """Map our composite operators, for torch.onnx.export, to formulas of few nodes."""
    short = ShortMoments()
    methods: Translations = {
        RELU_MOMENTS: short.relu_moments,
        MAX_MOMENTS: short.max_moments,
        TILED_MAXIMA: short.tiled_maxima,
        ALIKE_MAXIMA: short.alike_maxima,
        RECTIFIED_MAXIMA: short.rectified_maxima,
        DROPPED_VARIANCE: short.dropped_variance,
    }
    return {operator: _function(method) for operator, method in methods.items()}


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    """Turn the method into a function: torch leaves notes on what it is given, which methods do not take."""

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return function
