"""Writes adaptive max pooling as max pooling, whose windows are all of one size.

Adaptive pooling of s elements to c takes the elements floor(i s / c) to ceil((i + 1) s / c) - 1 for the i-th
output. Often that is a max pooling: where c divides s, and where the border cuts the first and the last
window off as padding does (5 to 3: windows of 3, every second, padding 1). Elsewhere the windows are laid out
side by side, and those that are shorter than others are filled up with values that never win.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import MAX_POOLS

aten = torch.ops.aten

Regular = tuple[int, int, int]  # kernel, stride and padding
Ranges = list[tuple[int, int]]  # first element, and the one behind the last


def adaptive_pool(op: Any, edit: Editor, source: fx.Node, like: Any) -> fx.Node | None:
    """The values of an adaptive max pooling by the max pooling `op`, where sizes are known."""
    value: Any = source.args[0]
    n = MAX_POOLS[op]
    sizes, counts = value.meta["val"].shape[-n:], like.shape[-n:]
    if not all(isinstance(s, int) for s in (*sizes, *counts)):
        return None
    windows: list[Regular] = []
    for dim, (size, count) in enumerate(zip(sizes, counts, strict=True), start=-n):
        ranges = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        regular = _regular(ranges, size)
        if regular is None:
            value, regular = _side_by_side(edit, value, ranges, dim)
        windows.append(regular)
    return edit.op(op, value, *[list(parts) for parts in zip(*windows, strict=True)])


def _regular(ranges: Ranges, size: int) -> Regular | None:
    """The max pooling of `size` elements with these windows, if there is one."""
    longest, step = max(b - a for a, b in ranges), size // len(ranges)
    for stride, kernel in product((max(step, 1), step + 1), range(longest, 2 * longest)):
        for padding in range(kernel // 2 + 1):
            starts = range(-padding, size + padding - kernel + 1, stride)
            if [(max(a, 0), min(a + kernel, size)) for a in starts] == ranges:
                return kernel, stride, padding
    return None


def _side_by_side(edit: Editor, value: fx.Node, ranges: Ranges, dim: int) -> tuple[fx.Node, Regular]:
    """All windows one behind the other along a dimension, filled up to the length of the longest."""
    kernel = max(b - a for a, b in ranges)
    lowest = torch.finfo(value.meta["val"].dtype).min / 2
    parts = []
    for first, end in ranges:
        part = edit.op(aten.slice.Tensor, value, dim, first, end)
        missing = [0] * (-2 * dim - 1) + [kernel - (end - first)]
        parts.append(edit.op(aten.constant_pad_nd.default, part, missing, lowest) if missing[-1] else part)
    return edit.op(aten.cat.default, parts, dim), (kernel, kernel, 0)
