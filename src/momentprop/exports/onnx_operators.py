"""Writes operators in ONNX for which torch.onnx.export has no translation, a wrong one, or a long one.

Long ones are those for moments of ReLU, of the maximum of two, and of max pooling. Runtimes pass over memory
once for every node, so formulas of few operators are wanted. With d = E1 - E2, S = sqrt(2 (V1 + V2)),
u = d / S, P = (1 + erf(u)) / 2 = P(X1 > X2) and r = E[(X1 - X2)+] = d P + S exp(-u^2) / (2 sqrt(pi)):

    E = E2 + r,   V = V2 + (V1 - V2) P + r (d - r),

and ReLU is the same with E2 = V2 = 0. Both are Clark's formulas, so they give what `gaussian` gives, to
float32's rounding of the largest terms. They take half the operators, but lose far tails: beyond five
standard deviations, where `gaussian` keeps its relative precision, they give 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from momentprop.gaussian.composites import DROPPED_VARIANCE, MAX_MOMENTS, RELU_MOMENTS
from momentprop.rules.max_pooling import ALIKE_MAXIMA, RECTIFIED_MAXIMA, TILED_MAXIMA

Translations = dict[Callable[..., Any], Callable[..., Any]]

_TINY = 2 * torch.finfo(torch.float32).tiny ** 0.8  # of S^2: the floor of `gaussian.safe_sqrt`
_LOG_C = -math.log(2 * math.sqrt(math.pi))
_LEAST_WEIGHT = 0.05  # of dropout, for a difference that loses no more than a digit
_MOST = 2**31  # for the end of a slice: all of it


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
    short = _ShortMoments()
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


class _ShortMoments:
    """Writes moments by formulas of few nodes; it serves one export, as it knows what that has already."""

    def __init__(self) -> None:
        from onnxscript import opset18

        self.op: Any = opset18  # typed more narrowly than it works
        self._squares: dict[Any, Callable[[], Any]] = {}  # second moments behind ReLU
        self._unclipped: dict[Any, Any] = {}  # variances before rounding below zero was taken off

    def _positive_part(self, d: Any, square: Any) -> tuple[Any, Any]:
        """Compute P and r from d and S^2."""
        op = self.op
        scale = op.Sqrt(op.Max(square, _TINY))
        u = op.Div(d, scale)
        probability = op.HardSigmoid(op.Erf(u), alpha=0.5, beta=0.5)  # which is linear where erf is
        density = op.Mul(scale, op.Exp(op.Sub(_LOG_C, op.Mul(u, u))))
        return probability, op.Add(op.Mul(d, probability), density)

    def _clipped(self, variance: Any) -> Any:
        op = self.op
        found = op.Relu(variance)
        self._unclipped[found] = variance
        return found

    def relu_moments(self, mean: Any, variance: Any) -> tuple[Any, Any]:
        op = self.op
        own = self._unclipped.get(variance, variance)
        probability, r = self._positive_part(mean, op.Add(own, own))
        inside = op.Mul(own, probability)
        out = r, self._clipped(op.Add(inside, op.Mul(r, op.Sub(mean, r))))
        self._squares[out] = lambda: op.Add(inside, op.Mul(r, mean))
        return out

    def dropped_variance(self, mean: Any, variance: Any, weight: float) -> Any:
        """Compute (1 + weight) E[X^2] - E[X]^2; behind ReLU these terms are there."""
        op = self.op
        if (mean, variance) in self._squares and weight > _LEAST_WEIGHT:
            return op.Relu(op.Sub(op.Mul(self._squares[mean, variance](), 1 + weight), op.Mul(mean, mean)))
        return op.Add(variance, op.Mul(op.Add(op.Mul(mean, mean), variance), weight))

    def _maximum(self, first: Any, second: Any, contrast: Any = None, far: bool = False) -> tuple[Any, Any]:
        """Take the maximum of two (mean, variance); its variance is negative by rounding only.

        `far`: one mean may be so far below that the other is nothing beside it, as that of padding is.
        """
        op = self.op
        d, total = op.Sub(first[0], second[0]), op.Add(first[1], second[1])
        square = op.Add(total, total) if contrast is None else op.Mul(total, contrast)
        probability, r = self._positive_part(d, square)
        mixed = op.Add(second[1], op.Mul(op.Sub(first[1], second[1]), probability))
        variance = op.Add(mixed, op.Mul(r, op.Sub(d, r)))
        if far:
            return op.Add(op.Max(first[0], second[0]), op.Sub(r, op.Relu(d))), variance
        return op.Add(second[0], r), variance

    def max_moments(self, mean_1: Any, variance_1: Any, mean_2: Any, variance_2: Any) -> tuple[Any, Any]:
        mean, variance = self._maximum((mean_1, variance_1), (mean_2, variance_2), far=True)
        return mean, self._clipped(variance)

    def _elements(self, x: Any, kernel: Sequence[int]) -> list[Any]:
        """Slice x into the elements of all windows, by position; `stride_convolutions` acts on such."""
        op = self.op
        n = len(kernel)
        axes = list(range(-n, 0))
        ends = [
            _MOST if size % k == 0 else size - size % k for size, k in zip(x.shape[-n:], kernel, strict=True)
        ]
        return [op.Slice(x, list(start), ends, axes, list(kernel)) for start in product(*map(range, kernel))]

    def tiled_maxima(self, mean: Any, variance: Any, kernel: Sequence[int]) -> tuple[Any, Any]:
        *others, best = zip(self._elements(mean, kernel), self._elements(variance, kernel), strict=True)
        for one in reversed(others):
            best = self._maximum(one, best)
        return best[0], self._clipped(best[1])

    def alike_maxima(self, mean: Any, variance: Any, contrast: Any, kernel: Sequence[int]) -> tuple[Any, Any]:
        """Take the maximum of windows whose rows have one variance each."""
        op = self.op
        means, width = self._elements(mean, kernel), kernel[-1]
        twice = op.Add(contrast, contrast)
        best: Any = None
        for i, shared in reversed(list(enumerate(self._elements(variance, [*kernel[:-1], 1])))):
            *others, last = means[i * width : (i + 1) * width]
            row = last, shared
            for j, one in enumerate(reversed(others)):
                if j == 0:
                    row = self._alike_maximum(one, last, shared, twice)
                else:
                    row = self._maximum((one, shared), row, contrast)
            best = row if best is None else self._maximum(row, best, contrast)
        return best[0], self._clipped(best[1])

    def _alike_maximum(self, first: Any, second: Any, variance: Any, twice: Any) -> tuple[Any, Any]:
        """Take the maximum of two means with the same variance."""
        op = self.op
        d = op.Sub(first, second)
        _, r = self._positive_part(d, op.Mul(variance, twice))
        return op.Add(second, r), op.Add(variance, op.Mul(r, op.Sub(d, r)))

    def rectified_maxima(self, mean: Any, variance: Any, kernel: Sequence[int]) -> tuple[Any, Any]:
        def rectified(one: tuple[Any, Any]) -> tuple[Any, Any]:
            mean, variance = self.relu_moments(*one)
            return mean, self._unclipped[variance]  # the maximum's is clipped

        *others, last = zip(self._elements(mean, kernel), self._elements(variance, kernel), strict=True)
        best = rectified(last)
        for one in reversed(others):
            best = self._maximum(rectified(one), best)
        return best[0], self._clipped(best[1])
