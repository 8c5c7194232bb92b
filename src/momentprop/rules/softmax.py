"""Softmax and log-softmax of independent Gaussian logits.

Mean. Tier `paper`, and two logits in every tier (Daunizeau 2017; the paper's softmax): with
E_kj = E[sigma(z_k - z_j)],

    p_k = 1 / (2 - K + sum_{j != k} 1/E_kj)  =  1 / (1 + sum_{j != k} (1 - E_kj) / E_kj),

renormalised to sum to one. The right-hand form has no cancellation and is evaluated in logarithms, so
that nothing underflows. Two approximations of E_kj, where z_k - z_j ~ N(m, v):

    tier `paper`:  Phi(m / sqrt(v + 8/pi))          (probit; not softmax at v = 0)
    other tiers:   sigma(m / sqrt(1 + pi v / 8))    (exactly softmax at v = 0)

More logits, in other tiers: to first order in V the mean is softmax(z) with z = E + V (1 - 2 p) / 2. Taken as
an equation for p, and with V / sqrt(1 + V / 5) in place of V, which grows as the standard deviation, it is
good for large V too. Two steps of Newton's method (by its diagonal) solve it: cost K instead of K^2, so that
it serves attention, and closer. Mean distance from sampling, in total variation, for logits of std 2 with
noise of std 0.3, 1 and 2: K = 16: 0.0005, 0.007, 0.03 (pairwise: 0.010, 0.08, 0.15); K = 256: 0.002, 0.02,
0.11 (0.025, 0.19, 0.37), sampling's own error included.

Variance of p_k: first order in the logits' variances, s = sum_j p_k^2 (d_kj - p_j)^2 V_j, brought below
its largest possible value b = p_k (1 - p_k) as s b / (s + b).

Log-softmax, in every tier, is log p_k = z_k - logsumexp(z), so its mean is E[log p_k], not log E[p_k]:

    E[log p_k] = log_softmax(E)_k - 1/2 sum_j p_j (1 - p_j) V_j / sqrt(1 + pi V_j / 32),
    Var[log p_k] = sum_j (d_kj - p_j)^2 V_j,

second and first order in V, with the logistic p above; the root makes the correction grow as sqrt(V) for
large V, as it does for two classes. Errors are stated, and tested, in tests/rules/test_softmax.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from momentprop.gaussian.normal import log_normal_cdf, root, safe_sqrt
from momentprop.moments import Logits, Moments
from momentprop.rules.linearization import Linearization, Propagated, mapped
from momentprop.rules.registry import Variant, rule

aten = torch.ops.aten

_CHUNK = 64  # logits compared at a time: memory stays at 64 K numbers for K logits, not K^2


def log_odds_probit(mean: Tensor, variance: Tensor) -> Tensor:
    """log (1 - E) / E for E = Phi(m / sqrt(v + 8/pi))."""
    u = mean / (variance + 8 / math.pi).sqrt()
    return log_normal_cdf(-u) - log_normal_cdf(u)


def log_odds_logistic(mean: Tensor, variance: Tensor) -> Tensor:
    """log (1 - E) / E for E = sigma(m / sqrt(1 + pi v / 8))."""
    return -mean / (1 + variance * (math.pi / 8)).sqrt()


def log_probabilities(mean: Tensor, variance: Tensor, log_odds: Any) -> Tensor:
    """Compute log p over the last dimension from the log odds of every two classes."""
    n = mean.shape[-1]
    if n == 0:
        return mean
    index = torch.arange(n, device=mean.device)
    parts = []
    for start in range(0, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        spread = variance[..., :, None] + variance[..., None, start:stop]
        odds = log_odds(mean[..., :, None] - mean[..., None, start:stop], spread)
        itself = index[:, None] == index[None, start:stop]
        # the term j = k stands in for the 1 of the denominator: log 1 = 0
        parts.append(torch.logsumexp(odds.masked_fill(itself, 0.0), -1, keepdim=True))
    denominator = torch.logsumexp(torch.cat(parts, -1), -1)
    return F.log_softmax(-denominator, -1)


_SATURATION = 0.2
_STEPS = 2
_STEEP = 1e6  # a variance of logits


Map = Callable[[Tensor], Tensor]


def implicit_logits(mean: Tensor, variance: Tensor, softmax: Map, total: Map) -> Tensor:
    """z with p = softmax(z) and z = E + V (1 - 2 p) / 2; `total` adds up what the softmax norms together."""
    damped = variance / (1 + _SATURATION * variance).sqrt()
    # a start that is good for large V: all logits brought together by their common standard deviation
    common = total(softmax(mean) * variance)
    shift = mean * ((1 + (math.pi / 8) * common).rsqrt() - 1)
    for _ in range(_STEPS):
        p = softmax(mean + shift)
        shift = shift + (0.5 * damped * (1 - 2 * p) - shift) / (1 + damped * p * (1 - p))
    return mean + shift


def implicit_probabilities(mean: Tensor, variance: Tensor) -> Tensor:
    """log p over the last dimension.

    Of logits that vary by more than 1,000 softmax is a step, whatever their scale. They are brought down to
    that: rounding of p (1 - p) would be multiplied by their standard deviation.
    """
    scale = (variance.amax(-1, keepdim=True) / _STEEP).clamp_min(1.0)
    mean, variance = mean * scale.rsqrt(), variance / scale
    softmax, total = partial(torch.softmax, dim=-1), partial(torch.sum, dim=-1, keepdim=True)
    return _log_softmax(implicit_logits(mean, variance, softmax, total))


def _log_softmax(logits: Tensor) -> Tensor:
    """Compute log p = -log(1 + what the others weigh), to relative precision for a sure class too."""
    top = logits.max(-1, keepdim=True)
    index = torch.arange(logits.shape[-1], device=logits.device)
    below = logits - top.values
    others = below.exp().masked_fill(index == top.indices, 0.0).sum(-1, keepdim=True)
    return below - torch.log1p(others)


def _log_mean_probabilities(mean: Tensor, variance: Tensor) -> Tensor:
    if mean.shape[-1] > 2:
        return implicit_probabilities(mean, variance)
    return log_probabilities(mean, variance, log_odds_logistic)


def _paper_log_probabilities(mean: Tensor, variance: Tensor) -> Tensor:
    return log_probabilities(mean, variance, log_odds_probit)


def _prepare(x: Moments, dim: int, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Mean and variance with the classes last."""
    if dtype is not None:
        x = x.to(dtype)
    # logits masked by -inf stay masked, but their differences become 0 instead of NaN
    mean = x.mean.clamp_min(torch.finfo(x.dtype).min / 4)
    return mean.movedim(dim, -1), x.variance.movedim(dim, -1)


def _log_spread(log_p: Tensor, variance: Tensor) -> Tensor:
    """First-order variance of log p_k: sum_j (d_kj - p_j)^2 V_j, over the last dimension."""
    if log_p.shape[-1] == 0:
        return variance
    own = torch.exp(2 * log_p) * variance
    # the sum over j != k as a difference, except where that would cancel: for the largest term itself
    index = torch.arange(own.shape[-1], device=own.device)
    largest = index == own.argmax(-1, keepdim=True)
    rest = own.masked_fill(largest, 0.0).sum(-1, keepdim=True)
    others = torch.where(largest, rest, own.sum(-1, keepdim=True) - own)
    return torch.expm1(log_p).square() * variance + others


def bounded_gain(p: Tensor, variance: Tensor) -> Tensor:
    """p, made smaller as the variance is bounded: see `_softmax_to_first_order`."""
    bound = (p * (1 - p)).clamp_min(torch.finfo(p.dtype).tiny)
    return p * safe_sqrt((1 - variance / bound).clamp_min(0))


def _softmax_to_first_order(p: Tensor, share: Tensor, dim: int, kind: torch.dtype) -> Linearization:
    """Jacobian p_k (d_kj - p_j), at the mean probabilities, its rows made smaller as the variance is bounded.

    V_k = s b / (s + b) is s times a share, so a row shrinks by the root of that.
    """
    dim = dim % p.dim()
    weight = p * root(share)

    def pull(cotangent: Tensor) -> list[Tensor]:
        weighted = cotangent * weight
        return [(weighted - p * weighted.sum(dim + 1, keepdim=True)).to(kind)]

    return mapped(pull)


def _softmax_rule(variant: Variant | None, log_mean: Any) -> None:
    approximation = "probit" if variant is Variant.PAPER else "implicit equation"

    @rule(
        aten.softmax.int,
        variant=variant,
        exactness=f"approximate: {approximation}, independent logits; variance to first order, bounded",
        reference="paper, softmax; Daunizeau 2017",
    )
    def softmax(x: Moments, dim: int, dtype: torch.dtype | None = None) -> Propagated:
        mean, variance = _prepare(x, dim, dtype)
        log_p = log_mean(mean, variance)
        tiny = torch.finfo(log_p.dtype).tiny
        p = log_p.exp().clamp_min(tiny)  # finite logits exclude no class
        bound = p * -torch.expm1(log_p)  # not 0 where p rounds to 1
        first_order = p * p * _log_spread(log_p, variance)
        share = bound / (first_order + bound).clamp_min(tiny)
        limited, kind = (first_order * share).movedim(-1, dim), x.dtype
        out = Moments(p.movedim(-1, dim), limited, logits=Logits(x, dim))
        return Propagated(out, lambda: _softmax_to_first_order(out.mean, share.movedim(-1, dim), dim, kind))


_softmax_rule(Variant.PAPER, _paper_log_probabilities)
_softmax_rule(None, _log_mean_probabilities)


@rule(
    aten.log_softmax.int,
    exactness="approximate: second order, independent logits; variance to first order",
    reference="delta method",
)
def log_softmax(x: Moments, dim: int, dtype: torch.dtype | None = None) -> Propagated:
    """Jacobian d_kj - p_j, at the probabilities that the mean logits give."""
    mean, variance = _prepare(x, dim, dtype)
    log_p = _log_mean_probabilities(mean, variance)
    curvature = -log_p.exp() * torch.expm1(log_p) * variance / (1 + variance * (math.pi / 32)).sqrt()
    log_mean = F.log_softmax(mean, -1) - 0.5 * curvature.sum(-1, keepdim=True)
    spread = _log_spread(log_p, variance).movedim(-1, dim)
    axis, kind = dim % mean.dim() + 1, x.dtype

    def linearize() -> Linearization:
        p = log_p.exp().movedim(-1, dim)
        return mapped(lambda c: [(c - p * c.sum(axis, keepdim=True)).to(kind)])

    return Propagated(Moments(log_mean.movedim(-1, dim), spread, logits=Logits(x, dim)), linearize)


def _one_dimension(arguments: Mapping[str, Any], _: frozenset[str]) -> str | None:
    return None if len(arguments["dim"]) == 1 else "over several dimensions it has no rule"


@rule(
    aten.logsumexp.default,
    exactness="approximate: second order, independent logits; variance to first order",
    reference="delta method",
    refuses=_one_dimension,
)
def logsumexp(x: Moments, dim: list[int], keepdim: bool = False) -> Propagated:
    """z_k - log p_k, for any k."""
    (d,) = dim
    mean, variance = _prepare(x, d, None)
    log_p = _log_mean_probabilities(mean, variance)
    p = log_p.exp()
    bend = (-p * torch.expm1(log_p) * variance / (1 + variance * (math.pi / 32)).sqrt()).sum(-1)
    out = Moments(torch.logsumexp(mean, -1) + 0.5 * bend, (p * p * variance).sum(-1))
    if keepdim:
        out = Moments(out.mean.unsqueeze(d), out.variance.unsqueeze(d))
    axis = d % mean.dim()

    def linearize() -> Linearization:
        weights = p.movedim(-1, axis)
        return mapped(lambda c: [(c if keepdim else c.unsqueeze(axis + 1)) * weights])

    return Propagated(out, linearize)
