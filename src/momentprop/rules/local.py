"""A rule to first order: a linear map of its inputs' deviations, plus fresh noise.

For jointly Gaussian X and Z, Stein's lemma gives Cov(g(X), Z) = E[g'(X)] Cov(X, Z). So, seen from any
other variable, every operator acts as a linear map J with J = dE_out / dE_in, the variances held fixed,
plus noise that is uncorrelated with everything before it. The output covariance is then a sum over noise
sources (adjoint.py), for which an operator has to say two things: its transposed map, and its noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# A cotangent of a tensor has K in front: [K, *shape], one row per output whose covariance is wanted.
# Where an operator returns a list, so does its cotangent, with None for what nothing depends on.
Pull = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Masked:
    """Elements that are kept or dropped, each by itself: kept less dropped, times sqrt(p(1-p)).

    That is value * scale, with the drop probability p.
    """

    value: Tensor
    scale: float
    drop_probability: float


@dataclass(frozen=True)
class Drops:
    """Independent sources that are kept or dropped, and what a cotangent's outputs answer to each.

    `rows` maps a cotangent to [K, batch, ...]: kept less dropped, times sqrt(p(1-p)).
    """

    rows: Callable[[Tensor], Tensor]
    drop_probability: float


@dataclass(frozen=True)
class Elementwise:
    """out = gain * x + noise, for an operator of one random input; None stands for gain 1, for no noise."""

    gain: Tensor | float | None = None
    noise: Tensor | None = None  # variance of each element's own, independent noise
    masked: Masked | None = None  # where that noise is a mask, what it is of


@dataclass(frozen=True)
class Linear:
    """out = sum of J_i x_i, plus noise.

    `pull` maps a cotangent of the output to one for each random input, in the order of the arguments;
    `spread`, to its products with independent sources of unit variance, [K, batch, ...]: noise that
    reaches several elements at once. `push` is the map itself, of deviations [R, *shape] of each random
    input, where the operator on plain values is another one: one that is not linear, or is not the map.
    `bend` is the second derivative along two such deviations. `shared` is noise as directions [P, *shape],
    each with a source of its own per sample (sketch.py).
    `drops` are those sources of `spread` that are masks.
    """

    pull: Pull
    noise: Tensor | None = None
    spread: Callable[[Tensor], Tensor] | None = None
    push: Callable[..., Tensor | None] | None = None  # None as its result: not known
    bend: Callable[..., Tensor] | None = None  # (d, d') -> second derivative along both, of all random inputs
    shared: Tensor | None = (
        None  # noise as directions [P, *shape] that reach all elements of a sample at once
    )
    drops: Drops | None = None


Local = Elementwise | Linear


def residual(out: Tensor, gain: Tensor, variance: Tensor) -> Tensor:
    """Variance that the gain does not explain: V_out - G^2 V, never negative."""
    return (out - gain * gain * variance).clamp_min(0)
