"""Finds the covariance of the classes of each decision in the covariance of all outputs of a sample."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from momentprop.graph import private
from momentprop.moments import Moments


def of_classes(moments: Moments, dim: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the covariance of the classes of each decision, and the indices of those that it is about."""
    covariance, shape = moments.covariance, moments.mean.shape
    if covariance is None:
        return None, None
    is_first = covariance.shape[0] == shape[0]
    positions = moments.mean.numel() // max(shape[0] * shape[dim], 1) if len(shape) > 2 else 1
    if is_first and positions == 1:
        return covariance, moments.indices
    if moments.indices is not None:
        return None, None
    return (_at_positions if is_first else _where_samples_are)(covariance, moments, dim), None


def _at_positions(covariance: Tensor, moments: Moments, dim: int) -> Tensor:
    """The covariance of the classes at every position, [batch * positions, K, K], out of all elements'."""
    shape = moments.mean.shape
    numbers = torch.arange(math.prod(shape[1:]), device=covariance.device).reshape(shape[1:])
    places = numbers.movedim(dim % len(shape) - 1, -1).reshape(-1, shape[dim])  # [positions, K]
    blocks = covariance[:, places[:, :, None], places[:, None, :]]
    return blocks.flatten(0, 1)


def _where_samples_are(covariance: Tensor, moments: Moments, dim: int) -> Tensor:
    """The covariance of the classes of each decision where samples are not the first dimension.

    A sample may have several rows, or another dimension be the batch. Logits are [before, batch, after] then,
    and the diagonal of the covariance tells where it is.
    """
    mean, (batch, size) = moments.mean, covariance.shape[:2]
    known = mean.numel() == batch * size and not (torch.compiler.is_compiling() or private.is_batched(mean))
    own = covariance.diagonal(dim1=1, dim2=2)
    for before in range(1, size + 1) if known else ():
        parts = (before, batch, size // before)
        if size % before == 0 and _close(
            moments.variance.reshape(parts).transpose(0, 1).reshape_as(own), own
        ):
            samples = torch.arange(batch, device=mean.device)[:, None].expand(parts)
            elements = torch.arange(size, device=mean.device).reshape(before, 1, -1).expand(parts)
            s, e = (v.reshape(mean.shape).movedim(dim, -1).flatten(0, -2) for v in (samples, elements))
            if bool((s == s[:, :1]).all()):
                return covariance[s[:, :1, None], e[:, :, None], e[:, None, :]]
    raise ValueError(
        f"the covariance is that of {batch} inputs, but the first dimension of the logits is {len(mean)}: "
        "classify needs the batch there, and the classes of one input in dimension `dim`"
    )


def _close(one: Tensor, other: Tensor) -> bool:
    return not bool(((one - other).abs() > 1e-3 * other.abs() + 1e-6 * other.abs().mean()).any())
