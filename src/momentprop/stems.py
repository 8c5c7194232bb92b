"""What two random tensors have in common, where it is known: covariance of the factors of a product."""

from __future__ import annotations

from torch import Tensor

from momentprop.moments import Moments


def covariance_of(x: Moments, y: Moments) -> Tensor | None:
    """Cov(x, y) element by element; None where nothing is known, which is taken as 0."""
    return x.variance if x is y else None


def covariance_of_rows(a: Moments, b: Moments) -> Tensor | None:
    """sum_j Cov(a_ij, b_jk) of a matrix product a @ b; None where nothing is known."""
    return None
