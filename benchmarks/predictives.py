"""Predictive distributions out of samples and of moments, and how fast those of samples converge."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from momentprop.validation import equivalence

POINTS, SOBOL_SEED = 4096, 0  # of the integral of softmax


class Predictive(equivalence.Predictive, Protocol):
    """One kind of predictive distribution; the leading dimensions of all tensors are free."""

    def of_samples(self, samples: Tensor) -> Tensor: ...  # [..., samples, inputs, outputs]
    def of_moments(self, mean: Tensor, covariance: Tensor) -> Tensor: ...  # [inputs, K], [inputs, K, K]


class Classes(equivalence.Classes):
    """Class probabilities [inputs, K], of logits."""

    def of_samples(self, samples: Tensor) -> Tensor:
        return samples.double().softmax(-1).mean(-3)

    def of_moments(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Softmax integrated over N(mean, covariance) at quasi-random points."""
        values, vectors = torch.linalg.eigh(covariance.double())
        factor = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        sobol = SobolEngine(mean.shape[-1], scramble=True, seed=SOBOL_SEED)
        normal = torch.special.ndtri(sobol.draw(POINTS, dtype=torch.float64).clamp(1e-12, 1 - 1e-12))
        parts = [
            (m.unsqueeze(1) + normal @ f.mT).softmax(-1).mean(1)
            for m, f in zip(mean.double().split(50), factor.split(50), strict=True)
        ]
        return torch.cat(parts)


class Gaussian(equivalence.Gaussian):
    """Mean and variance of every output [inputs, outputs, 2]."""

    def of_samples(self, samples: Tensor) -> Tensor:
        return torch.stack([samples.double().mean(-3), samples.double().var(-3)], -1)

    def of_moments(self, mean: Tensor, covariance: Tensor) -> Tensor:
        return torch.stack([mean, covariance.diagonal(dim1=-2, dim2=-1)], -1).double()


def convergence(kind: Predictive, truth: Tensor, samples: Tensor, sizes: list[int]) -> dict[int, float]:
    """Mean divergence of MC dropout with T samples, over inputs and up to 50 disjoint blocks of samples.

    The truth's own error is part of it, as it is part of ours: equal values mean equal fidelity.
    """
    curve = {}
    for size in sizes:
        count = min(equivalence.MOST_BLOCKS, len(samples) // size)
        if size >= kind.smallest and count:
            blocks = samples[: count * size].unflatten(0, (count, size))
            curve[size] = kind.kl(truth, kind.of_samples(blocks)).mean().item()
    return curve
