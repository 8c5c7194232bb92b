"""Turns Gaussian logits into class probabilities: the integral of softmax over N(E, C).

`integrate` takes a fixed set of points in logit space: it is deterministic, sums to one, is softmax at zero
variance, and gives second moments and the expected entropy as well. `paper` is a closed formula for the mean
alone; benchmarks/predictive.py compares both with others from the literature. They work on logits [n, K] and
return logarithms of probabilities, which stay finite where probabilities underflow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from momentprop.gaussian.normal import safe_sqrt
from momentprop.graph.private import constant_result
from momentprop.rules.softmax import log_odds_probit, log_probabilities

_POINTS_PER_CLASS, _MOST_POINTS = 205, 4096  # 1,025 for five classes, 2,050 for ten
_POINTS_ON_A_LINE = 512  # two classes: their difference is one variable
_AT_ONCE = 2**18  # elements of a block of points: what caches hold, measured
_AT_ONCE_COMPILED = 2**24  # compilers write nothing out that they need once


@dataclass(frozen=True)
class GaussianLogits:
    """Gaussian logits, class dimension last: [n, K].

    Covariance is [n, K, K], or [n, m, m] over the classes at `indices` [n, m], the others being independent;
    without it all are.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None
    indices: Tensor | None = None

    @property
    def n_classes(self) -> int:
        return self.mean.shape[-1]

    def difference(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the second logit less the first."""
        variance = self.variance[:, 0] + self.variance[:, 1]
        full = self.full_covariance()
        if full is not None:
            variance = (variance - 2 * full[:, 0, 1]).clamp_min(0)
        return self.mean[:, 1] - self.mean[:, 0], variance

    def split(self, rows: int) -> list[GaussianLogits]:
        """Split into parts of so many inputs."""
        parts = [None if v is None else v.split(rows) for v in (self.covariance, self.indices)]
        means, variances = self.mean.split(rows), self.variance.split(rows)
        covariances, indices = ([None] * len(means) if p is None else p for p in parts)
        return [
            GaussianLogits(*values) for values in zip(means, variances, covariances, indices, strict=True)
        ]

    def full_covariance(self) -> Tensor | None:
        """[n, K, K], with zeros for what is not known."""
        if self.covariance is None or self.indices is None:
            return self.covariance
        picked = F.one_hot(self.indices, self.n_classes).to(self.mean.dtype)  # [n, m, K]
        return picked.mT @ self.covariance @ picked


@dataclass(frozen=True)
class Averages:
    """Holds averages over the points: log E[p], E[p^2] and E[entropy of p]."""

    log_probs: Tensor
    second: Tensor | None = None
    entropy: Tensor | None = None


def integrate(logits: GaussianLogits) -> Averages:
    """Averages over a fixed set of normal points, moved and scaled to the logits.

    Softmax sees differences of logits only, so what all have in common is taken out of the covariance first;
    and with two classes there is one difference, for which the points lie on a line.
    """
    rows = max(_AT_ONCE // 64 // logits.n_classes, 1)
    if logits.mean.shape[0] > rows and not torch.compiler.is_compiling():
        return _joined([integrate(part) for part in logits.split(rows)])
    mean = logits.mean[..., None]
    if logits.n_classes == 2:
        difference, variance = (d[:, None] for d in logits.difference())
        step = safe_sqrt(variance)

        def on_line(e: Tensor) -> Tensor:
            z = difference + step * e
            return torch.stack([torch.zeros_like(z), z], 1)

        return average(on_line, _on_a_line(_POINTS_ON_A_LINE, mean.dtype).to(mean), logits.mean)
    count = min(_POINTS_PER_CLASS * logits.n_classes, _MOST_POINTS) // 2 * 2
    points = _normal_points(logits.n_classes, count, mean.dtype).to(mean)
    std = safe_sqrt(logits.variance)[..., None]
    if logits.covariance is None:
        return average(lambda e: mean + std * e, points, logits.mean)
    if logits.indices is None:
        factor = _factor(_centred(logits.covariance), logits.n_classes - 1)
        return average(lambda e: mean + torch.matmul(factor, e), points, logits.mean)
    factor, chosen = _factor(logits.covariance), logits.indices

    def partly(e: Tensor) -> Tensor:
        together = torch.matmul(factor, e[chosen])
        return mean + (std * e).scatter(1, chosen[..., None].expand(together.shape), together)

    return average(partly, points, logits.mean)


def _joined(parts: list[Averages]) -> Averages:
    seconds = [p.second for p in parts if p.second is not None]
    entropies = [p.entropy for p in parts if p.entropy is not None]
    return Averages(torch.cat([p.log_probs for p in parts]), torch.cat(seconds), torch.cat(entropies))


def average(values: Callable[[Tensor], Tensor], points: Tensor, like: Tensor) -> Averages:
    """Average over the softmax of `values` [n, K, N] at points [..., N], in blocks that fit into memory.

    Probabilities too small for their type keep a logarithm: that of their largest value over the points.
    """
    count = points.shape[-1]
    most = _AT_ONCE_COMPILED if torch.compiler.is_compiling() else _AT_ONCE
    if torch.compiler.is_exporting():  # for any batch size: no block fits all of them
        blocks: tuple[Tensor, ...] = (points,)
    else:
        size = max(most // max(like.numel(), 1), 1)
        blocks = points.split(size, -1) if count > size else (points,)
    first, second, entropy, largest = [], [], [], []
    for block in blocks:
        z = values(block)
        z = (z - z.amax(1, keepdim=True)).clamp_min(torch.finfo(z.dtype).min / 4)  # classes masked by -inf
        weights = z.exp()
        total = weights.sum(1, keepdim=True)
        p, log_total = weights / total, total.log()
        first.append(p.sum(-1))
        second.append((p * p).sum(-1))
        # log_total - sum of p z over the classes, but summed over the points first, as everything else is
        entropy.append(log_total.sum(-1)[:, 0] - (p * z).sum(-1).sum(1))
        largest.append((z - log_total).amax(-1))
    probs, squares, expected = (torch.stack(sums).sum(0) / count for sums in (first, second, entropy))
    tiny = torch.finfo(probs.dtype).tiny
    bound = torch.stack(largest).amax(0) - math.log(count)
    log_probs = torch.where(probs > tiny * 1e6, probs.clamp_min(tiny).log(), bound)
    return Averages(log_probs, squares, expected)


def paper(logits: GaussianLogits) -> Averages:
    """Daunizeau 2017 as in the paper: p_k ~ 1 / (2 - K + sum over l of 1 / E[sigmoid(z_k - z_l)]).

    E[sigmoid] is approximated by the probit, and logits count as independent.
    """
    return Averages(log_probabilities(logits.mean, logits.variance, log_odds_probit))


# how softmax can be averaged, by the name that `classify` takes
METHODS: dict[str, Callable[[GaussianLogits], Averages]] = {
    method.__name__: method for method in (integrate, paper)
}


def _centred(covariance: Tensor) -> Tensor:
    """Return the covariance of the logits less their mean, which softmax does not see."""
    rows = covariance.mean(-1, keepdim=True)
    return covariance - rows - rows.mT + rows.mean(-2, keepdim=True)


def _factor(covariance: Tensor, rank: int | None = None) -> Tensor:
    """L with L L^T = C, column by column: runtimes that cannot factor matrices can do this.

    A column whose pivot is rounding error is zero, so that C may be singular; so are those beyond the rank.
    """
    n = covariance.shape[-1]
    eps, tiny = torch.finfo(covariance.dtype).eps * n, torch.finfo(covariance.dtype).tiny ** 0.5
    columns: list[Tensor] = []
    for j in range(n if rank is None else rank):
        column = covariance[:, :, j]
        if columns:
            before = torch.stack(columns, -1)
            column = column - (before * before[:, j : j + 1, :]).sum(-1)
        pivot = column[:, j : j + 1]
        enough = pivot > (eps * covariance[:, j : j + 1, j]).clamp_min(tiny)
        scale = torch.where(enough, pivot, 1.0).rsqrt() * enough
        below = torch.arange(n, device=covariance.device) >= j
        columns.append(column * scale * below)
    columns += [torch.zeros_like(columns[0])] * (n - len(columns))
    return torch.stack(columns, -1)


@constant_result  # constants of the compiled graph
def _normal_points(dimension: int, count: int, dtype: torch.dtype) -> Tensor:
    """Quasi-random normal points [dimension, count], each with its negative, of unit variance."""
    return _sobol(dimension, count, dtype)


@constant_result
def _on_a_line(count: int, dtype: torch.dtype) -> Tensor:
    """Normal points [count]: the middles of intervals of equal probability."""
    return _middles(count, dtype)


@contextmanager
def _plainly() -> Iterator[None]:
    """Constants are made on the CPU, outside of whatever mode the caller is in, since they are kept."""
    with _disable_current_modes(), torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
        yield


@functools.cache
def _sobol(dimension: int, count: int, dtype: torch.dtype) -> Tensor:
    with _plainly():
        sobol = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=0)
        uniform = sobol.draw(count // 2, dtype=torch.float64)
        half = torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9))
        half = half / half.square().mean(0).sqrt()
        return torch.cat([half, -half]).T.contiguous().to(dtype)


@functools.cache
def _middles(count: int, dtype: torch.dtype) -> Tensor:
    with _plainly():
        points = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
        return (points / points.square().mean().sqrt()).to(dtype)
