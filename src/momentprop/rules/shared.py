"""Noise that all elements of a channel share, told to operators that add them up.

Behind channel dropout the elements of a channel are kept or lost together. Of their variance V a part d^2 is
such noise, one variable per channel times a direction d, [batch, channels, ...]. A linear map W adds it up
before it is squared,

    V_out = (W*W) (V - d^2) + sum over channels c of (W_c d_c)^2,

where (W*W) V alone would take elements that fall together for independent ones. Channel dropout attaches the
direction to its output; operators that multiply by constants scale it, those that keep the elements in order
pass it on, averages within channels average it, and everything else forgets it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from momentprop.moments import Moments


def direction_of(x: Any) -> Tensor | None:
    """The direction [batch, channels, ...] of what elements of a channel share, if that is known.

    Its elements are those of x in row-major order; x may have another shape.
    """
    return getattr(x, "_direction", None)


def share(out: Moments, direction: Tensor | None) -> Moments:
    out._direction = direction  # type: ignore[attr-defined]
    return out


def moved_direction(x: Any, map: Callable[[Tensor], Tensor]) -> Tensor | None:
    """That of a linear map within channels; None where x has other dimensions than its direction."""
    direction = direction_of(x)
    return None if direction is None or direction.shape != x.shape else map(direction)


def variance_within(
    x: Moments, squared: Callable[[Tensor], Tensor], map: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Variance and direction of a linear map within channels, `squared` being the map with W*W for W."""
    moved = moved_direction(x, map)
    if moved is None:
        return squared(x.variance), None
    return squared(alone(x)) + moved * moved, moved


def alone(x: Moments) -> Tensor:
    """The part of the variance that elements do not share."""
    direction = direction_of(x)
    if direction is None:
        return x.variance
    return (x.variance - (direction * direction).reshape(x.shape)).clamp_min(0)
