"""Reductions over segments: elements are put together by an index (`scatter_reduce`), as graph networks do.

Sums and means are linear. The greatest of a segment, for independent Gaussians, has the distribution function
F(t) = prod_i Phi((t - E_i) / sqrt V_i). It is computed at 64 points of every segment, from where nearly no
maximum lies below to where nearly none lies above, as a sum of logarithms over the segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.normal import log_normal_cdf, safe_sqrt
from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.rules.families import only_random
from momentprop.rules.linearization import Propagated, mapped
from momentprop.rules.registry import Rule, rule
from momentprop.rules.scatter import first_elements, padded
from momentprop.rules.softmax import bounded_gain, implicit_logits

aten = torch.ops.aten

_CELLS = 64
_REACH = 5.0  # standard deviations
_FAR = 60.0
_BESIDE = 1e-3  # of a cell


@dataclass(frozen=True, eq=False)
class Segments:
    """Says to which element of the output sources belong, and whether `self` is one of them."""

    dim: int
    index: Tensor
    with_self: Tensor  # in the shape of the output

    def per_source(self, values: Tensor) -> Tensor:
        """The segment's value for every element of the source; there may be dimensions in front."""
        return values.gather(*self._behind(values))

    def total(self, own: Tensor, sources: Tensor) -> Tensor:
        """The sum over every segment; there may be dimensions in front."""
        dim, index = self._behind(sources)
        return torch.where(self.with_self, own, 0.0).scatter_add(dim, index, sources)

    def greatest(self, own: Tensor, sources: Tensor) -> Tensor:
        lowest = torch.where(self.with_self, own, float("-inf"))
        return aten.scatter_reduce.two(lowest, self.dim, self.index, sources, "amax")

    def gathered_total(self, sources: Tensor, like: Tensor) -> Tensor:
        """The sum of its segment for every element of the source."""
        extra = sources.shape[: sources.dim() - like.dim()]
        return self.per_source(self.total(like.expand(*extra, *like.shape), sources))

    def _behind(self, values: Tensor) -> tuple[int, Tensor]:
        extra = values.shape[: values.dim() - self.index.dim()]
        return len(extra) + self.dim, self.index.expand(*extra, *self.index.shape)


def _refuses(arguments: Mapping[str, Any], random: frozenset[str]) -> str | None:
    if arguments["reduce"] == "prod":
        return "a product over a segment has no rule; the exponential of a sum of logarithms has one"
    return only_random("self", "src")(arguments, random)


@rule(
    aten.scatter_reduce.two,
    exactness="sums and means: exact for uncorrelated inputs; extremes: approximate, independent Gaussians",
    reference="linear; distribution of a maximum",
    refuses=_refuses,
)
def scatter_reduce(
    x: Any, dim: int, index: Tensor, src: Any, reduce: str, *, include_self: bool = True
) -> Propagated:
    part = first_elements(src, index)
    ones = torch.ones_like(mean_of(part))
    dim = dim % max(mean_of(x).dim(), 1)
    none = aten.scatter.value(torch.ones_like(mean_of(x), dtype=torch.bool), dim, index, False)
    segments = Segments(dim, index, none | include_self)
    if reduce in ("amax", "amin"):
        out, weight, own = _greatest(segments, x, part, 1 if reduce == "amax" else -1)
        explained = segments.total(own * own * variance_of(x), weight * weight * variance_of(part))
        noise = (out.variance - explained).clamp_min(0)
    else:
        mean = aten.scatter_reduce.two(
            mean_of(x), dim, index, mean_of(part), reduce, include_self=include_self
        )
        share = torch.ones_like(mean)
        if reduce == "mean":
            share = 1 / segments.total(share, ones)
        out = Moments(mean, share * share * segments.total(variance_of(x), variance_of(part)))
        own, weight, noise = torch.where(segments.with_self, share, 0.0), segments.per_source(share), None

    def back(cotangent: Tensor) -> list[Tensor]:
        found = [cotangent * own] if is_moments(x) else []
        if is_moments(src):
            found.append(padded(segments.per_source(cotangent) * weight, src))
        return found

    return Propagated(out, lambda: mapped(back, noise))


def _greatest(segments: Segments, x: Any, src: Any, sign: int) -> tuple[Moments, Tensor, Tensor]:
    """Moments, and the chances of the sources and of `self` to be the greatest (the least for sign -1)."""
    means, stds = (
        (sign * mean_of(x), sign * mean_of(src)),
        (safe_sqrt(variance_of(x)), safe_sqrt(variance_of(src))),
    )
    low, high = (
        segments.greatest(*[m + side * _REACH * s for m, s in zip(means, stds, strict=True)])
        for side in (-1, 1)
    )
    finite = low.isfinite()  # an untouched element may be infinite
    start, width = torch.where(finite, low, 0.0), torch.where(finite, high - low, 0.0)
    edges = torch.arange(_CELLS + 1, dtype=low.dtype, device=low.device) / _CELLS
    # a little below the first edge and above all: a constant, which often is there, lies in between
    beside = torch.cat([edges[:1] - _BESIDE / _CELLS, edges + _BESIDE / _CELLS])
    points = beside.reshape(-1, *[1] * low.dim()) * width + start

    own = _log_below(points, means[0], stds[0])
    sources = _log_below(segments.per_source(points), means[1], stds[1])
    together = segments.total(own, sources)
    mean, variance = _moments(together[1:].exp(), edges)
    out = Moments(sign * torch.where(finite, start + width * mean, low), width * width * variance)

    chances = [_chance(together, own), _chance(segments.per_source(together), sources)]
    total = segments.total(*chances).clamp_min(torch.finfo(low.dtype).tiny)
    of_self = torch.where(segments.with_self, chances[0] / total, 0.0)
    return out, chances[1] / segments.per_source(total), of_self


def _log_below(points: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return log_normal_cdf(((points - mean) / std).clamp(-_FAR, _FAR))


def _moments(below: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a variable on [0, 1] with this distribution function at the edges of cells.

    What a cell holds counts as at its middle, whereby smooth distributions get 1 / 12 of its square too wide
    (Sheppard).
    """
    shape = [-1, *[1] * (below.dim() - 1)]
    middle = ((edges[1:] + edges[:-1]) / 2).reshape(shape)
    inside = below[1:] - below[:-1]
    least, most = below[0], 1 - below[-1]
    mean = (inside * middle).sum(0) + most
    variance = (inside * (middle - mean).square()).sum(0) + least * mean * mean + most * (1 - mean).square()
    return mean, (variance - inside.sum(0) / (12 * _CELLS**2)).clamp_min(0)


def _chance(together: Tensor, own: Tensor) -> Tensor:
    """The chance to be the greatest, up to a factor: the others are below wherever this one is."""
    others = (together - own).exp()
    itself = own.exp()
    return ((others[1:] + others[:-1]) / 2 * (itself[1:] - itself[:-1])).sum(0)


def segment_softmax(x: Tensor, dim: int, index: Tensor, like: Tensor) -> Tensor:
    """Softmax over the elements of x along `dim` that have the same index; `like` is [..., segments, ...]."""
    return _normed(x, _over(x, dim, index, like), like)


def _over(x: Tensor, dim: int, index: Tensor, like: Tensor) -> Segments:
    if index.dim() != x.dim():
        index = index.reshape([-1 if d == dim else 1 for d in range(x.dim())])
    return Segments(dim, index.expand(x.shape), torch.zeros_like(like, dtype=torch.bool))


def _normed(x: Tensor, segments: Segments, like: Tensor) -> Tensor:
    greatest = segments.greatest(like, x)
    weight = (x - segments.per_source(greatest)).exp()
    return weight / segments.gathered_total(weight, like)


def _segment_softmax(x: Moments, dim: int, index: Tensor, like: Tensor) -> Propagated:
    """As softmax over a dimension (softmax.py), with sums over segments."""
    segments = _over(x.mean, dim, index, like)

    def total(values: Tensor) -> Tensor:
        return segments.gathered_total(values, like)

    def softmax(logits: Tensor) -> Tensor:
        return _normed(logits, segments, like)

    p = softmax(implicit_logits(x.mean, x.variance, softmax, total))
    own = p * p * x.variance
    others = (total(own) - own).clamp_min(0)
    first_order = p * p * ((1 - p) * (1 - p) * x.variance + others)
    bound = p * (1 - p)
    variance = first_order * (bound / (first_order + bound).clamp_min(torch.finfo(p.dtype).tiny))

    def pull(cotangent: Tensor) -> list[Tensor]:
        weighted = cotangent * bounded_gain(p, variance)
        return [weighted - p * total(weighted)]

    return Propagated(Moments(p, variance), lambda: mapped(pull))


SEGMENT_SOFTMAX = Rule(
    segment_softmax,  # type: ignore[arg-type]
    _segment_softmax,
    exactness="approximate: implicit equation, independent logits; variance to first order, bounded",
    reference="as softmax",
)
