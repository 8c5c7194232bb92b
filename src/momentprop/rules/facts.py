"""Declares what a rule knows of its output beyond moments, and how such knowledge goes on.

A fact is declared here, typed, and travels with the moments it is about. By default an operator's output
knows nothing; operators that act element by element hand on what stays true (`carried`), reshapes what does
not depend on the shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Fact, Moments

aten = torch.ops.aten

Gain = Callable[[], Any]  # computed when a fact asks for it; None stands for 1


@dataclass(frozen=True, eq=False)
class ElementMap:
    """out = gain * x + constant, element by element, as a fact needs to know it."""

    gain: Gain
    linear: bool = True  # exactly so, not to first order
    noisy: bool = False  # and every element has noise of its own


def carried(out: Moments, x: Any, gain: Any = None, *, linear: bool = True, noisy: bool = False) -> Moments:
    """The output with what still holds of the facts about x, behind an operator that acts on each element."""
    if not isinstance(x, Moments) or not x.facts or out.shape != x.shape:
        return out
    step = ElementMap(gain if callable(gain) else lambda: gain, linear, noisy)
    return knowing(out, *[fact.after(step, out) for fact in x.facts])


def reshaped(out: Moments, x: Moments) -> Moments:
    """The output, whose elements are those of x in the same order, with what still holds of the facts."""
    return knowing(out, *[fact.reshaped(out) for fact in x.facts]) if x.facts else out


def knowing(out: Moments, *facts: Fact | None) -> Moments:
    """The same moments with these facts in place of others."""
    return dataclasses.replace(out, facts=tuple([fact for fact in facts if fact is not None]))


@dataclass(frozen=True, eq=False)
class Neighbours(Fact):
    """Covariance between elements of one tensor that are a small offset apart, told on demand.

    Outputs of a convolution that share inputs are correlated, which matters inside pooling windows. Storing
    all those covariances would cost far more than the network, so they are computed where they are asked for.

    `told(start, step, count, shift)`, one number per spatial dimension each, gives
    Cov(z[start + i step], z[start + shift + i step]) for 0 <= i < count; None stands for zero.
    """

    told: Callable[[list[int], list[int], list[Any], list[int]], Tensor | None]

    def after(self, step: ElementMap, out: Moments) -> Neighbours:
        """Cov(g1 z1, g2 z2) = g1 g2 Cov(z1, z2); the gain broadcasts."""
        inner = self.told

        def told(start: list[int], stride: list[int], count: list[Any], shift: list[int]) -> Tensor | None:
            covariance = inner(start, stride, count, shift)
            gain = None if covariance is None else step.gain()
            if covariance is None or gain is None:
                return covariance
            if not isinstance(gain, Tensor):
                return covariance * (gain * gain)
            there = [a + b for a, b in zip(start, shift, strict=True)]
            return covariance * lattice(gain, start, stride, count) * lattice(gain, there, stride, count)

        return Neighbours(told)


@dataclass(frozen=True, eq=False)
class Contrast(Fact):
    """Says how unlike elements of a channel are on average that are so far apart: cheaper than `Neighbours`.

    `told(shifts)` gives one number per sample and channel, [batch, channels, 1, ...], the average over
    positions and over these shifts, with

        Var(X1 - X2) = contrast (V1 + V2) / 2.

    It is 2 for independent elements, and 0 for elements that are always alike.
    """

    told: Callable[[list[list[int]]], Tensor]

    def after(self, step: ElementMap, out: Moments) -> Contrast | None:
        if not step.linear or step.noisy:
            return None
        return self if _same_in_channels(step.gain(), out.mean.dim()) else None


@dataclass(frozen=True, eq=False)
class Shared(Fact):
    """Noise that all elements of a channel share, told to operators that add them up.

    Behind channel dropout the elements of a channel are kept or lost together. Of their variance V a part d^2
    is such noise, one variable per channel times a direction d, [batch, channels, ...]. A linear map W adds
    it up before it is squared,

        V_out = (W*W) (V - d^2) + sum over channels c of (W_c d_c)^2,

    where (W*W) V alone would take elements that fall together for independent ones. The direction's elements
    are those of the tensor in row-major order; the tensor may have another shape.
    """

    direction: Tensor

    def after(self, step: ElementMap, out: Moments) -> Shared | None:
        if not step.linear or self.direction.shape != out.shape:
            return None
        gain = step.gain()
        return self if gain is None else Shared(self.direction * gain)

    def reshaped(self, out: Moments) -> Shared:
        return self


@dataclass(frozen=True, eq=False)
class Directions(Fact):
    """A few directions [r, *shape] in which all elements vary together: part of their variance."""

    rows: Tensor

    def after(self, step: ElementMap, out: Moments) -> Directions:
        gain = step.gain()
        return self if gain is None else Directions(self.rows * gain)


@dataclass(frozen=True, eq=False)
class Unexplained(Fact):
    """Variance of one of an operator's several results that its linear part does not explain."""

    noise: Tensor


def neighbours_of(x: Any) -> Callable[..., Tensor | None] | None:
    """Return the function by which x tells its neighbours' covariance, if it does."""
    fact = x.fact(Neighbours) if isinstance(x, Moments) else None
    return None if fact is None else fact.told


def direction_of(x: Any) -> Tensor | None:
    """Return what elements of a channel of x share, if that is known."""
    fact = x.fact(Shared) if isinstance(x, Moments) else None
    return None if fact is None else fact.direction


def variance_within(
    x: Moments, squared: Callable[[Tensor], Tensor], map: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Shared | None]:
    """Variance behind a linear map within channels, and what elements share there.

    `squared` is the map with W*W in place of W.
    """
    direction = direction_of(x)
    if direction is None or direction.shape != x.shape:
        return squared(x.variance), None
    moved = map(direction)
    return squared(alone(x)) + moved * moved, Shared(moved)


def alone(x: Moments) -> Tensor:
    """The part of the variance that elements do not share."""
    direction = direction_of(x)
    if direction is None:
        return x.variance
    return (x.variance - (direction * direction).reshape(x.shape)).clamp_min(0)


def lattice(values: Tensor, start: list[int], step: list[int], count: list[Any]) -> Tensor:
    """values[..., start + i step] over the last dimensions; those of size one broadcast."""
    n = len(start)
    for d in range(-min(n, values.dim()), 0):
        if values.shape[d] != 1:
            first, stride, number = start[n + d], step[n + d], count[n + d]
            values = aten.slice.Tensor(values, d, first, first + (number - 1) * stride + 1, stride)
    return values


def _same_in_channels(gain: Any, dim: int) -> bool:
    """Say whether all elements of a channel, in a tensor of so many dimensions, have the same gain."""
    if not isinstance(gain, Tensor):
        return True
    return all(gain.shape[d] == 1 for d in range(-min(dim - 2, gain.dim()), 0))
