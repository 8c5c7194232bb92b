"""Dropout: where the noise comes from.

Every dropout of PyTorch is Y = s (Z B - c) with Z = X + shift, B ~ Bernoulli(1 - p) independent of X, and
numbers s and c that leave no bias. With gain G = s (1 - p) and weight W = s^2 p (1 - p),

    E[Y] = G E,    V[Y] = G^2 V + W (V + E[Z]^2).

Inverted dropout divides by 1 - p: G = 1, W = p / (1 - p), no shift. Alpha dropout (Klambauer et al. 2017)
sets dropped values to -1.758, the lower limit of SELU, instead of 0, and scales so that mean 0 and variance 1
are kept. Channel dropout (Dropout1d, 2d, 3d) draws one B for all elements of a channel.

Exact. (The paper's table is for dropout without rescaling; the two differ by the factor 1/(1-p).)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.composites import dropped_variance
from momentprop.moments import Moments, is_moments, mean_of
from momentprop.rules.facts import Neighbours, Shared, carried, knowing, lattice, neighbours_of
from momentprop.rules.linearization import (
    Diagonal,
    Dropped,
    Linearization,
    Propagated,
    Spread,
    mapped,
    scaled,
    source,
)
from momentprop.rules.registry import EXACT, Role, rule

aten = torch.ops.aten

_SELU_LIMIT = 1.7580993408473766  # -(scale * alpha) of SELU is where it saturates


@dataclass(frozen=True)
class Mask:
    """Says what a mask does to a value: mean times gain, noise weight (V + E[Z]^2), Z = X + shift."""

    gain: float | None  # None stands for 1
    weight: float
    shift: float = 0.0

    @staticmethod
    def inverted(p: float) -> Mask:
        return Mask(None, p / (1 - p))

    @staticmethod
    def alpha(p: float) -> Mask:
        scale = ((_SELU_LIMIT**2 * p + 1) * (1 - p)) ** -0.5
        return Mask(scale * (1 - p), scale**2 * p * (1 - p), _SELU_LIMIT)

    def center(self, x: Any) -> Tensor:
        """The mean of what is kept or lost."""
        mean: Tensor = mean_of(x)
        return mean + self.shift if self.shift else mean

    def noise(self, x: Any) -> Tensor:
        center = self.center(x)
        return self.weight * (center * center + x.variance if is_moments(x) else center * center)

    def direction(self, x: Any) -> Tensor:
        """Return what one mask for many elements moves, times its standard deviation."""
        return self.center(x) * self.weight**0.5

    def scaled(self, value: Tensor) -> Tensor:
        return value if self.gain is None else value * self.gain

    def moments(self, x: Any) -> Moments:
        if is_moments(x) and self.gain is None and not self.shift:
            return Moments(x.mean, dropped_variance(x.mean, x.variance, self.weight))
        noise = self.noise(x)
        if is_moments(x):
            noise = self.scaled(self.scaled(x.variance)) + noise
        return Moments(self.scaled(mean_of(x)), noise)


def _elements(op: Any, mask_of: Callable[[float], Mask], reference: str) -> None:
    """A dropout with one mask for every element."""

    @rule(op, exactness=EXACT, reference=reference, role=Role.MASK)
    def dropout(x: Any, p: float, train: bool) -> Any:
        if not train or p == 0:
            return Propagated(x, scaled)
        mask = mask_of(p)

        def linearize() -> Linearization:
            variance = mask.noise(x)
            variance = variance.clamp_max(torch.finfo(variance.dtype).max)  # times 0 it is to be 0
            noise = Diagonal(variance, (Dropped(mask.center(x), mask.weight**0.5, p),))
            return scaled(mask.gain, noise) if is_moments(x) else source(noise)

        # masks are independent, so elements are correlated as they were before
        return Propagated(carried(mask.moments(x), x, mask.gain, noisy=True), linearize)


def _channels(op: Any, mask_of: Callable[[float], Mask], reference: str) -> None:
    """A dropout with one mask for every channel: each element by itself has the same moments."""

    @rule(op, exactness=EXACT, reference=reference, role=Role.MASK)
    def channel_dropout(x: Any, p: float, train: bool) -> Any:
        if not train or p == 0:
            return Propagated(x, scaled)
        mask = mask_of(p)
        out = mask.moments(x)
        shared = Shared(mask.direction(x)) if out.mean.dim() > 2 else None
        return Propagated(knowing(out, _within_channels(x, mask), shared), lambda: _channel_noise(x, mask, p))


def _channel_noise(x: Moments | Tensor, mask: Mask, p: float) -> Linearization:
    """One source per channel, acting along E[Z]: a dropped channel loses all its means at once.

    The part of x that is random itself is lost with them. That adds W Cov(x_i, x_j) within the
    channel, of which only the diagonal is known here: W V, element by element.
    """
    direction = mask.direction(x)

    def along(cotangent: Tensor) -> Tensor:
        found = cotangent * direction
        return found.sum(list(range(3, found.dim()))) if found.dim() > 3 else found

    if not isinstance(x, Moments):
        return source(Spread(along, p))
    return mapped(lambda cotangent: [mask.scaled(cotangent)], mask.weight * x.variance, Spread(along, p))


def _within_channels(x: Any, mask: Mask) -> Neighbours:
    """Cov(Y_i, Y_j) = W E[Z_i] E[Z_j] + (G^2 + W) Cov(X_i, X_j): elements of a channel share their fate."""
    center, inner = mask.center(x), neighbours_of(x)
    factor = mask.weight + (1.0 if mask.gain is None else mask.gain**2)

    def told(start: list[int], step: list[int], count: list[Any], shift: list[int]) -> Tensor:
        there = [a + b for a, b in zip(start, shift, strict=True)]
        common = lattice(center, start, step, count) * lattice(center, there, step, count) * mask.weight
        before = None if inner is None else inner(start, step, count, shift)
        return common if before is None else common + before * factor

    return Neighbours(told)


_elements(aten.dropout.default, Mask.inverted, "paper, dropout")
_channels(aten.feature_dropout.default, Mask.inverted, "paper, dropout")
_elements(aten.alpha_dropout.default, Mask.alpha, "Klambauer et al. 2017")
_channels(aten.feature_alpha_dropout.default, Mask.alpha, "Klambauer et al. 2017")
