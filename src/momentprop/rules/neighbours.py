"""Covariance between elements of one tensor that are a small offset apart, told on demand.

Outputs of a convolution that share inputs are correlated, which matters inside pooling windows. Storing
all those covariances would cost far more than the network; so a convolution attaches to its output a
function that computes them where they are asked for, operators that act element by element scale it,
and everything else forgets it.

Computed so, they are convolutions once more, as many products as the network has itself where windows are
2x2. Tier `fast` makes do with one number per sample and channel, the average over positions and pairs of
elements of a window, which costs next to nothing: their contrast,

    Var(X1 - X2) = contrast (V1 + V2) / 2.

It is 2 for independent elements, and 0 for elements that are always alike. The variances themselves are there
averages over each row of a window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments

aten = torch.ops.aten

# (start, step, count, shift), one number per spatial dimension each ->
# Cov(z[start + i step], z[start + shift + i step]) for 0 <= i < count; None stands for zero.
Neighbours = Callable[[list[int], list[int], list[Any], list[int]], Tensor | None]

# shifts -> the contrast of elements so far apart, on average over the shifts: [batch, channels, 1, ...].
Contrast = Callable[[list[list[int]]], Tensor]


def neighbours_of(x: Any) -> Neighbours | None:
    """What x tells about its neighbours' covariance, if it does."""
    return getattr(x, "_neighbours", None)


def attach(out: Moments, neighbours: Neighbours | None) -> Moments:
    out._neighbours = neighbours  # type: ignore[attr-defined]
    return out


def contrast_of(x: Any) -> Contrast | None:
    """What x tells about the contrast of its neighbours, channel by channel, if it does."""
    return getattr(x, "_contrast", None)


def attach_contrast(out: Moments, contrast: Contrast | None) -> Moments:
    out._contrast = contrast  # type: ignore[attr-defined]
    return out


def same_in_channels(gain: Tensor | float, dim: int) -> bool:
    """Whether all elements of a channel, in a tensor of so many dimensions, have the same gain."""
    if not isinstance(gain, Tensor):
        return True
    return all(gain.shape[d] == 1 for d in range(-min(dim - 2, gain.dim()), 0))


def scaled(x: Any, gain_of: Callable[[], Tensor | float]) -> Neighbours | None:
    """For gain * x: Cov(g1 z1, g2 z2) = g1 g2 Cov(z1, z2). The gain broadcasts to x."""
    inner = neighbours_of(x)
    if inner is None:
        return None

    def told(start: list[int], step: list[int], count: list[Any], shift: list[int]) -> Tensor | None:
        covariance = inner(start, step, count, shift)
        if covariance is None:
            return None
        gain = gain_of()
        if not isinstance(gain, Tensor):
            return covariance * (gain * gain)
        there = [a + b for a, b in zip(start, shift, strict=True)]
        return covariance * lattice(gain, start, step, count) * lattice(gain, there, step, count)

    return told


def lattice(values: Tensor, start: list[int], step: list[int], count: list[Any]) -> Tensor:
    """values[..., start + i step] over the last dimensions; those of size one broadcast."""
    n = len(start)
    for d in range(-min(n, values.dim()), 0):
        if values.shape[d] != 1:
            first, stride, number = start[n + d], step[n + d], count[n + d]
            values = aten.slice.Tensor(values, d, first, first + (number - 1) * stride + 1, stride)
    return values
