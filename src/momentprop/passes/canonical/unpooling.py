"""Joins a max unpooling with the max pooling of its indices: a value goes to a random place of its window.

The place is that of the largest x of the window, so element i of the window gets y with the chance P_i that
x_i is the largest, else 0. With y independent of where,

    E_i = P_i E_y,    V_i = P_i (E_y^2 + V_y) - E_i^2.

Seen from other variables that is P_i y; the rest is noise. (Correlation between place and value counts as
noise; that exactly one element is filled is ignored.)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from momentprop.graph.edit import Editor
from momentprop.graph.schema import bind
from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.passes.runner import Pass
from momentprop.rules.families import per_dimension
from momentprop.rules.linearization import Linearization, Propagated, mapped
from momentprop.rules.max_pooling import maximum_of
from momentprop.rules.registry import Rule
from momentprop.rules.windows import Windows

aten = torch.ops.aten

_POOL = aten.max_pool2d_with_indices.default
_GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")


def join_unpooling(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Write max_unpool2d(y, indices of x) as one operator of y and x, where windows tile x."""
    y, index, size = node.args[:3]
    if not isinstance(index, fx.Node) or index.target is not operator.getitem or index.args[1] != 1:
        return None
    pool: Any = index.args[0]
    if pool.target is not _POOL:
        return None
    given = bind(pool.target, pool.args, pool.kwargs)
    x, kernel = given["self"], per_dimension(given["kernel_size"], 2)
    sizes = x.meta["val"].shape[-2:]
    if not Windows.of(sizes, *[given[name] for name in _GEOMETRY]).tile:
        return None
    whole = all(isinstance(s, int) and s % k == 0 for s, k in zip(sizes, kernel, strict=True))
    if not whole or list(sizes) != list(size):  # type: ignore[arg-type]
        return None
    return edit.op(_RULE, y, x, kernel, value=node.meta["val"])


def _plain(y: Tensor, x: Tensor, kernel: list[int]) -> Tensor:
    indices = _POOL(x, kernel)[1]
    return aten.max_unpool2d.default(y, indices, x.shape[-2:])


def _wide(pooled: Tensor, kernel: list[int]) -> Tensor:
    """Give every element of a window the window's value."""
    return pooled.repeat_interleave(kernel[0], -2).repeat_interleave(kernel[1], -1)


def _moments(y: Any, x: Any, kernel: list[int]) -> Propagated:
    chances, area = _chances(x, kernel), kernel[0] * kernel[1]
    mean = _wide(mean_of(y), kernel) * chances
    second = _wide(mean_of(y) * mean_of(y) + variance_of(y), kernel) * chances
    variance = (second - mean * mean).clamp_min(0)

    def pull(cotangent: Tensor) -> list[Tensor | None]:
        first: list[Tensor | None] = []
        if is_moments(y):
            rows = (cotangent * chances).flatten(0, 1)
            first = [(F.avg_pool2d(rows, kernel) * area).reshape(cotangent.shape[0], *y.shape)]
        return [*first, None] if is_moments(x) else first

    def linearize() -> Linearization:
        explained = chances * chances * _wide(variance_of(y), kernel)
        return mapped(pull, (variance - explained).clamp_min(0))

    return Propagated(Moments(mean, variance), linearize)


def _chances(x: Any, kernel: list[int]) -> Tensor:
    """The chance of every element to be the largest of its window: how much the maximum moves with it."""
    if not is_moments(x):
        return _plain(torch.ones_like(_POOL(x, kernel)[0]), x, kernel)
    windows = Windows.of(x.shape[-2:], kernel, (), 0, 1, False)
    best, _ = maximum_of(x, windows)
    gains = windows.tiled([best.weights[p] for p in windows.positions])
    for d in range(2):
        gains = gains.flatten(-3 - d, -2 - d)
    return gains.movedim(-1, -3)


_RULE = Rule(
    _plain,  # type: ignore[arg-type]
    _moments,
    exactness="approximate: values independent of where they go, windows' elements of each other",
    reference="mixture",
)
JOIN_UNPOOLING = Pass((aten.max_unpool2d.default,).__contains__, join_unpooling)
