"""Piecewise linear functions of a Gaussian: exact moments and gain, whatever the knots.

Let m be the mean. Beyond each knot t, seen from m, the function leaves the line it follows around m: with
y = (X - m) / std, counted positive towards the knot, and a = |t - m| / std, by

    w(y) = c (y - a)+ + j [y > a],

c being the change of slope, times std, and j the jump. So f(X) = f(m) + slope (X - m) + sum of w, where m
enters only through distances, and a knot that is far away adds zero. With Q, g, h the probability and the
first two partial moments of the upper tail beyond a, phi the normal density,

    E[w] = c g + j Q,    E[y w] = c Q + j phi,    E[w^2] = c^2 h + 2 c j g + j^2 Q,

products of knots on the same side are of the same kind, and on different sides they vanish. (What cancels
is a bounded function whose pieces are much narrower than std: rounding costs eps slope^2 V there.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.normal import safe_sqrt, tail_moments


def piecewise_linear(
    mean: Tensor,
    variance: Tensor,
    knots: list[Any],
    lines: list[tuple[Any, Any]],
    jumps: list[Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and gain of f(X) for X ~ N(mean, variance); exact.

    `knots` ascend; `lines` has one more entry, (intercept, slope): left of all, between, right of all.
    `jumps` is by how much f rises at each knot, 0 if not given. All may be numbers or tensors.
    """
    std = safe_sqrt(variance)
    inverse = 1 / std
    value, slope = _line(lines[0], mean), _tensor(lines[0][1], mean)
    shift: Any = 0.0
    gain: Any = 0.0
    square: Any = 0.0
    beyond: list[tuple[Any, ...]] = []
    for k, knot in enumerate(knots):
        passed = mean >= knot
        value = torch.where(passed, _line(lines[k + 1], mean), value)
        slope = torch.where(passed, _tensor(lines[k + 1][1], mean), slope)
        away = torch.where(passed, mean - knot, knot - mean)
        q, g, h, density, a = tail_moments(away * inverse)
        c = lines[k + 1][1] - lines[k][1]
        first, along, second = c * g, c * q, c * c * h
        jump: Any = None
        if jumps is not None:
            jump = torch.where(passed, -inverse, inverse) * jumps[k]
            first, along, second = first + jump * q, along + jump * density, second + jump * (2 * c * g)
            second = second + jump * jump * q
        for other in beyond:
            square = square + 2 * _product(other, (passed, a, c, jump, q, g, h))
        beyond.append((passed, a, c, jump, q, g, h))
        shift, square = shift + first, square + second
        gain = gain + torch.where(passed, -along, along)
    spread = (square - shift * shift) + slope * (slope + 2 * gain)
    return value + std * shift, variance * spread.clamp_min(0), slope + gain


def _product(lower: tuple[Any, ...], upper: tuple[Any, ...]) -> Tensor:
    """E[w w'] of two knots: zero, unless both stand on the same side of the mean."""
    passed_lower, a_lower, c_lower, j_lower, *tail_lower = lower
    passed_upper, a_upper, c_upper, j_upper, *tail_upper = upper
    distance = (a_upper - a_lower).abs()
    # (near: c y + j) times (far: c (y - a) + j), over the tail beyond the far one
    right = _beyond(c_lower, j_lower, distance, c_upper, j_upper, tail_upper)  # both above the mean
    left = _beyond(c_upper, j_upper, distance, c_lower, j_lower, tail_lower)  # both below
    return torch.where(passed_upper, left, torch.where(passed_lower, 0.0, right))


def _beyond(c_near: Any, j_near: Any, distance: Tensor, c: Any, j: Any, tail: list[Tensor]) -> Tensor:
    q, g, h = tail
    if j is None:
        return c_near * c * (h + distance * g)
    return c_near * (c * h + j * g) + (c_near * distance + j_near) * (c * g + j * q)


def _line(line: tuple[Any, Any], x: Tensor) -> Tensor:
    intercept, slope = line
    return x * slope + intercept


def _tensor(value: Any, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else like.new_full((), value)
