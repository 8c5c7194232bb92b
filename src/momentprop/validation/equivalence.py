"""Measures how far a predictive distribution is from MC dropout's, and how many samples that is worth.

Classes: the predictive is the mean of softmax over logits. Other outputs: the Gaussian with the same mean and
variance, without observation noise. Both are tensors, so that blocks of samples are compared at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

SIZES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
"""Numbers of samples at which the error of MC dropout is measured."""
MOST_BLOCKS = 50


class Predictive(Protocol):
    """One kind of predictive distribution; the leading dimensions of all tensors are free."""

    smallest: int  # number of samples that defines one

    def kl(self, truth: Tensor, other: Tensor) -> Tensor: ...  # [..., inputs]


class Classes:
    """Class probabilities [inputs, K]."""

    smallest = 1

    def kl(self, truth: Tensor, other: Tensor) -> Tensor:
        return (torch.xlogy(truth, truth) - torch.xlogy(truth, other)).sum(-1)


class Gaussian:
    """Mean and variance of every output [inputs, outputs, 2], the outputs taken one by one."""

    smallest = 5  # with fewer than 4 the expected divergence is infinite, by small estimates of the variance

    def kl(self, truth: Tensor, other: Tensor) -> Tensor:
        """KL(N(m0, v0), N(m1, v1)); infinite where v1 = 0. Outputs that do not vary at all are left out."""
        (m0, v0), (m1, v1) = truth.unbind(-1), other.unbind(-1)
        kl = 0.5 * ((v0 + (m0 - m1) ** 2) / v1 - 1 + v1.log() - v0.log())
        kl = torch.where(v1 > 0, kl, math.inf)
        return torch.where(v0 > 0, kl, math.nan).nanmean(-1)


def entropy(probabilities: Tensor) -> Tensor:
    return -torch.xlogy(probabilities, probabilities).sum(-1)


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1].item()


@dataclass(frozen=True)
class Samples:
    """A number of samples, or a bound (">" or "<") where it lies outside of what was measured.

    >>> print(Samples(12.5)), print(Samples(500, ">"))
    12.5
    > 500
    (None, None)
    """

    value: float
    bound: str = ""

    def __str__(self) -> str:
        digits = 1 if self.value < 20 and not self.bound else 0
        return f"{self.bound} {self.value:,.{digits}f}".strip()

    def is_at_least(self, wanted: float) -> bool:
        """Say whether so many samples were reached; "> 500" says so of 500 and of less."""
        return self.bound != "<" and self.value >= wanted


def equivalent_samples(kl: float, curve: Mapping[int, float]) -> Samples:
    """The T at which MC dropout diverges as much, by linear interpolation in log-log.

    >>> print(equivalent_samples(0.02, {10: 0.1, 100: 0.01}))
    50
    """
    finite = [(size, value) for size, value in sorted(curve.items()) if math.isfinite(value) and value > 0]
    sizes = [float(size) for size, _ in finite]
    # the last values scatter around the truth's own error: only what falls is information
    values = [min(v for _, v in finite[: i + 1]) for i in range(len(finite))]
    if not values:
        return Samples(math.nan)
    if not kl < values[0]:
        return Samples(sizes[0], "<")
    if kl < values[-1]:
        return Samples(sizes[-1], ">")
    i = next(i for i, value in enumerate(values) if value <= kl)
    if values[i] == values[i - 1]:
        return Samples(sizes[i - 1])
    share = math.log(values[i - 1] / kl) / math.log(values[i - 1] / values[i])
    return Samples(round(sizes[i - 1] * (sizes[i] / sizes[i - 1]) ** share, 2))
