"""Moments of a final softmax, log-softmax or sigmoid, integrated over mean and covariance of its logits.

What a rule makes of these operators serves inside a network. At its end more is known, the covariance of the
logits, and more is asked: where logits are sharp, probabilities are far from linear in them. Softmax is
integrated at the points that predictive distributions are made of (gaussian/logits.py), sigmoid element by
element (gaussian/logistic.py).

Where a sample has several positions (pixels, tokens), all its classes correlate as G C G^T, with the mean
Jacobian G = E[diag(p) - p p^T]: by Stein's lemma that is the first term of a series, and never indefinite.
Where outputs are chosen among several positions, these are integrated with independent logits, and chosen
probabilities correlate as their logits do.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.engine.layouts import Layout, shape_of_one
from momentprop.gaussian.logistic import sigmoid_series
from momentprop.gaussian.logits import GaussianLogits, head_moments
from momentprop.gaussian.normal import safe_sqrt
from momentprop.graph.ops import HEADS
from momentprop.moments import Logits, Moments

# Probabilities of one sample at all points together, but not fewer points than these for every position. With
# sharp logits (std 3) 512 points make a KL of 4e-4 for 10 classes and 5e-3 for 384, std to 1 and 9 %.
_PROBABILITIES, _FEWEST_POINTS = 2**13, 512
_FEWEST_POINTS_OF_MANY = 64  # where there are several positions


@dataclass(frozen=True)
class Head:
    """A final softmax, log-softmax or sigmoid."""

    operator: str
    logits: str  # the value it is made of
    dim: int | None
    shape: tuple[int, ...]  # of a batch of one

    @staticmethod
    def of(node: fx.Node) -> Head:
        """The head that is this node."""
        operator, shape = HEADS[node.target], shape_of_one(node.meta["val"])
        over: Any = node.args[1] if len(node.args) > 1 else None
        dim = None if operator == "sigmoid" else over % len(shape)
        return Head(operator, str(node.args[0]), dim, shape)

    def applied(self, logits: Moments, layout: Layout | None = None) -> Moments:
        """The output. `layout` says which elements a covariance is about."""
        wide = logits.to(torch.float32) if torch.finfo(logits.dtype).bits == 16 else logits
        out = _sigmoid(wide, layout) if self.dim is None else self._softmax(wide, layout)
        if out.covariance is not None:  # which rounding leaves a little oblique
            out = dataclasses.replace(out, covariance=(out.covariance + out.covariance.mT) / 2)
        return dataclasses.replace(out.to(logits.dtype), logits=Logits(logits, self.dim))

    def _softmax(self, logits: Moments, layout: Layout | None) -> Moments:
        assert self.dim is not None
        rows = _Rows(self.shape, self.dim, layout, logits.mean)
        mean = rows.of(logits.mean)
        if mean.shape[1] < 2:
            nothing = 0.0 * logits.variance
            sure = nothing + 1 if self.operator == "softmax" else nothing
            alike = None if logits.covariance is None else 0.0 * logits.covariance
            return dataclasses.replace(logits, mean=sure, variance=nothing, covariance=alike)
        mean = mean.clamp_min(torch.finfo(mean.dtype).min / 4)  # classes masked by -inf
        joint, indices = logits.covariance, logits.indices
        if joint is not None and rows.positions > 1:
            joint, indices = None if indices is not None else rows.blocks(joint), None
        fewest = _FEWEST_POINTS if rows.positions == 1 else _FEWEST_POINTS_OF_MANY
        most = max(_PROBABILITIES // math.prod(self.shape), fewest)
        is_log = self.operator == "log_softmax"
        found = head_moments(GaussianLogits(mean, rows.of(logits.variance), joint, indices), most, is_log)
        out, covariance = Moments(rows.back(found.mean), rows.back(found.variance)), found.covariance
        if logits.covariance is not None and layout is not None and rows.positions > 1:
            if covariance is None:
                covariance = _correlated_alike(logits, out, layout)
            else:
                p = found.mean.softmax(-1) if is_log else found.mean
                gains = torch.eye(p.shape[1]).to(p) - p[:, None, :]
                if not is_log:
                    gains = torch.diag_embed(p) - p[:, :, None] * p[:, None, :] - covariance
                covariance = rows.joined(logits.covariance, gains, layout.samples(out.variance))
        return dataclasses.replace(out, covariance=covariance, indices=logits.indices)


class _Rows:
    """Values as rows of classes [n, K], one for every position of every sample."""

    def __init__(self, shape: tuple[int, ...], dim: int, layout: Layout | None, like: Tensor) -> None:
        self.dim, self.layout, self.like = dim, layout, like
        self.size, self.k = math.prod(shape), shape[dim]
        self.positions = self.size // self.k
        if layout is not None:
            lined = torch.arange(self.k).reshape(-1, *[1] * (len(shape) - dim - 1)).expand(shape)
            order = layout.samples(lined)[0].argsort(stable=True)  # of a sample's elements: class by class
            self.places = order.reshape(self.k, -1).T.to(like.device)  # [positions, K]
            self.inverse = self.places.flatten().argsort()

    def of(self, value: Tensor) -> Tensor:
        if self.layout is None:
            return value.movedim(self.dim, -1).reshape(-1, self.k)
        samples = self.layout.samples(value)
        return samples if self.positions == 1 else samples[:, self.places].reshape(-1, self.k)

    def back(self, rows: Tensor) -> Tensor:
        if self.layout is None:
            return rows.reshape(self.like.movedim(self.dim, -1).shape).movedim(-1, self.dim)
        rows = rows if self.positions == 1 else rows.reshape(-1, self.size)[:, self.inverse]
        return self.layout.restored(rows, self.like)

    def blocks(self, covariance: Tensor) -> Tensor:
        """The covariance within every position, [n, K, K], of that of samples, [batch, size, size]."""
        return covariance[:, self.places[:, :, None], self.places[:, None, :]].flatten(0, 1)

    def joined(self, covariance: Tensor, gains: Tensor, variance: Tensor) -> Tensor:
        """G C G^T of samples, row and column scaled to these variances, [batch, size]: never indefinite."""
        p, k = self.positions, self.k
        pairs = covariance[:, self.places[:, None, :, None], self.places[None, :, None, :]]
        g = gains.reshape(-1, p, k, k)
        found = g[:, :, None] @ pairs @ g[:, None].mT  # [batch, positions, positions, K, K]
        flat = found.transpose(2, 3).reshape(-1, self.size, self.size)[:, self.inverse][:, :, self.inverse]
        first_order = flat.diagonal(dim1=1, dim2=2)
        known = first_order > 0
        ratio = safe_sqrt(torch.where(known, variance / torch.where(known, first_order, 1.0), 0.0))
        itself = torch.eye(self.size, dtype=torch.bool, device=flat.device)
        return torch.where(itself, variance[:, :, None], flat * ratio[:, :, None] * ratio[:, None, :])


def _sigmoid(logits: Moments, layout: Layout | None) -> Moments:
    found = sigmoid_series(logits.mean, logits.variance)
    out = Moments(found.mean, found.variance)
    if logits.covariance is None or layout is None:
        return out
    r, std = _correlation(logits, layout), _chosen(out.std, logits, layout)
    first, second, third = (_chosen(v, logits, layout) for v in (found.first, found.second, found.third))
    alike = _outer(first) * r + _outer(second) * r.square() + _outer(third) * r**3
    return dataclasses.replace(out, covariance=_outer(std) * alike, indices=logits.indices)


def _correlated_alike(logits: Moments, out: Moments, layout: Layout) -> Tensor:
    return _correlation(logits, layout) * _outer(_chosen(out.std, logits, layout))


def _correlation(logits: Moments, layout: Layout) -> Tensor:
    assert logits.covariance is not None
    scale = safe_sqrt(_chosen(logits.variance, logits, layout)).reciprocal()
    return (logits.covariance * scale[:, :, None] * scale[:, None, :]).clamp(-1, 1)


def _chosen(value: Tensor, logits: Moments, layout: Layout) -> Tensor:
    """Of the elements that have a covariance: [batch, m]."""
    samples = layout.samples(value)
    return samples if logits.indices is None else samples.gather(1, logits.indices)


def _outer(value: Tensor) -> Tensor:
    return value[:, :, None] * value[:, None, :]
