"""Integrates softmax over Gaussian logits N(E, C), at a fixed set of points in logit space.

That is deterministic, sums to one, and is softmax at zero variance. `integrate` gives what a predictive
distribution consists of, with logarithms of probabilities, which stay finite where probabilities underflow;
`head_moments` gives mean and covariance of the probabilities, or of their logarithms. Logits are [n, K].
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

from momentprop.gaussian.normal import safe_sqrt
from momentprop.graph.private import constant_result, outside_of_modes

_POINTS_PER_CLASS, _MOST_POINTS = 205, 4096  # 1,025 for five classes, 2,050 for ten
_POINTS_ON_A_LINE = 512  # two classes: their difference is one variable
_LEAST_STD = 0.02  # of logits whose deviations rounding does not drown
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

    def wider(self, factor: Tensor) -> GaussianLogits:
        """The logits with standard deviations so many times as large, [n, 1, 1]."""
        square = factor * factor
        covariance = None if self.covariance is None else self.covariance * square
        return GaussianLogits(self.mean, self.variance * square[..., 0], covariance, self.indices)

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


Placed = Callable[[Tensor], Tensor]  # points of unit variance [..., N] -> logits [n, K, N]


def integrate(logits: GaussianLogits) -> Averages:
    """Averages over a fixed set of normal points, moved and scaled to the logits."""
    rows = max(_AT_ONCE // 64 // logits.n_classes, 1)
    if logits.mean.shape[0] > rows and not torch.compiler.is_compiling():
        return _joined([integrate(part) for part in logits.split(rows)])
    return average(*_placed(logits, _MOST_POINTS), logits.mean)


@dataclass(frozen=True)
class HeadMoments:
    """Holds mean and variance [n, K]; the covariance is [n, K, K], or of the chosen classes alone."""

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None


def head_moments(logits: GaussianLogits, most: int, logarithm: bool) -> HeadMoments:
    """Moments of softmax, or of its logarithm, by at most so many points; covariance if logits have one.

    What is added up are deviations from the value at the mean logits. That of the class with the largest
    logit is what all others' leave over, which keeps its digits where the class is all but sure. Where all
    logits hardly vary, deviations are taken further out and brought back, or rounding would drown them.
    """
    rows = max(_AT_ONCE // 64 // logits.n_classes, 1)
    if logits.mean.shape[0] > rows and not torch.compiler.is_compiling():
        parts = [head_moments(part, most, logarithm) for part in logits.split(rows)]
        joint = [p.covariance for p in parts if p.covariance is not None]
        means, variances = ([getattr(p, name) for p in parts] for name in ("mean", "variance"))
        return HeadMoments(torch.cat(means), torch.cat(variances), torch.cat(joint) if joint else None)
    far = (_LEAST_STD / safe_sqrt(logits.variance.amax(-1))).clamp_min(1.0)[:, None, None]
    varies = (logits.variance > 0).any(-1)[:, None, None]
    logits = logits.wider(far)
    place, points = _placed(logits, most)
    is_top = torch.arange(logits.n_classes, device=points.device) == logits.mean.argmax(-1, keepdim=True)
    top = is_top[..., None]

    def value(z: Tensor) -> Tensor:
        return _log_softmax(z, top) if logarithm else torch.softmax(z, 1)

    center = value(logits.mean[..., None])

    def sums(block: Tensor) -> tuple[Tensor, ...]:
        away = value(place(block)) - center
        if not logarithm:
            away = torch.where(top, -away.masked_fill(top, 0.0).sum(1, keepdim=True), away)
        found = away.sum(-1, keepdim=True), away.square().sum(-1, keepdim=True)
        if logits.covariance is None:
            return found
        if logits.indices is not None:
            away = away.gather(1, logits.indices[..., None].expand(-1, -1, away.shape[-1]))
        return *found, away @ away.mT

    found = [sums(block) for block in _blocks(points, logits.mean)]
    first, second, *both = (torch.stack(v).sum(0) / points.shape[-1] for v in zip(*found, strict=True))
    back = varies * (far * far).reciprocal()
    mean = (center + back * first)[..., 0]
    variance = (back * (second - first.square()).clamp_min(0))[..., 0]
    if not both:
        return HeadMoments(mean, variance, None)
    if logits.indices is not None:
        first = first.gather(1, logits.indices[..., None])
    return HeadMoments(mean, variance, back * (both[0] - first * first.mT))


def _log_softmax(z: Tensor, top: Tensor) -> Tensor:
    """Log-softmax of z [n, K, N], to relative precision for a sure class too: the one that `top` marks."""
    z = z - torch.where(top, z, 0.0).sum(1, keepdim=True)
    highest = z.amax(1, keepdim=True)  # 0 or larger
    others = (z - highest).exp().masked_fill(top, 0.0).sum(1, keepdim=True)
    return z - (highest + torch.log1p(others + torch.expm1(-highest)))


def _placed(logits: GaussianLogits, most: int) -> tuple[Placed, Tensor]:
    """A function from points to logits, and at most so many points.

    Softmax sees differences of logits only, so what all have in common is taken out of the covariance first;
    and with two classes there is one difference, for which the points lie on a line.
    """
    mean = logits.mean[..., None]
    if logits.n_classes == 2:
        difference, variance = (d[:, None] for d in logits.difference())
        step = safe_sqrt(variance)

        def on_line(e: Tensor) -> Tensor:
            z = difference + step * e
            return torch.stack([torch.zeros_like(z), z], 1)

        return on_line, _on_a_line(min(_POINTS_ON_A_LINE, most), mean.dtype).to(mean)
    count = min(_POINTS_PER_CLASS * logits.n_classes, most) // 2 * 2
    points = _normal_points(logits.n_classes, count, mean.dtype).to(mean)
    std = safe_sqrt(logits.variance)[..., None]
    if logits.covariance is None:
        return lambda e: mean + std * e, points
    if logits.indices is None:
        factor = _factor(_centred(logits.covariance), logits.n_classes - 1)
        return lambda e: mean + torch.matmul(factor, e), points
    factor, chosen = _factor(logits.covariance), logits.indices

    def partly(e: Tensor) -> Tensor:
        together = torch.matmul(factor, e[chosen])
        return mean + (std * e).scatter(1, chosen[..., None].expand(together.shape), together)

    return partly, points


def _blocks(points: Tensor, like: Tensor) -> tuple[Tensor, ...]:
    """The points [..., N] in blocks that fit into memory, for logits [n, K]."""
    count = points.shape[-1]
    if torch.compiler.is_exporting():  # for any batch size: no block fits all of them
        return (points,)
    most = _AT_ONCE_COMPILED if torch.compiler.is_compiling() else _AT_ONCE
    size = max(most // max(like.numel(), 1), 1)
    return points.split(size, -1) if count > size else (points,)


def _joined(parts: list[Averages]) -> Averages:
    seconds = [p.second for p in parts if p.second is not None]
    entropies = [p.entropy for p in parts if p.entropy is not None]
    return Averages(torch.cat([p.log_probs for p in parts]), torch.cat(seconds), torch.cat(entropies))


def average(values: Callable[[Tensor], Tensor], points: Tensor, like: Tensor) -> Averages:
    """Average over the softmax of `values` [n, K, N] at points [..., N], in blocks that fit into memory.

    Probabilities too small for their type keep a logarithm: that of their largest value over the points.
    """
    count = points.shape[-1]
    first, second, entropy, largest = [], [], [], []
    for block in _blocks(points, like):
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
    with outside_of_modes(), torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
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
