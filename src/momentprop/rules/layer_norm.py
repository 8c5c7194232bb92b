"""Layer, group, instance and RMS norm: normalised by statistics of the sample, which are random too.

With d = x - mean(x) over n elements (RMS norm: d = x), s = mean(d^2) and r = 1 / sqrt(s + eps),

    y_i = gamma_i d_i r + beta_i.

The statistics are taken at their expectation, noise included: with D the mean of d,

    S = E[s] = mean(D^2) + mean(V) (1 - 1/n),    R = 1 / sqrt(S + eps),    u = D R,

and to second order around it, for uncorrelated x,

    E[d_i r] = u_i (1 + 3/8 Var(s) R^4 - V_i R^2 / n),    Var(s) = sum(4 D^2 V + 2 V^2) / n^2.

Seen from any other variable the operator is its Jacobian there,

    J_ij = R (delta_ij - (1 + u_i u_j) / n)    (RMS norm: R (delta_ij - u_i u_j / n)),

whose rows give the variance, sum_j J_ij^2 V_j. Beyond first order there is noise of order 1/n. Its total is
known, because sum((d r)^2) = n s / (s + eps) always, whose mean is, to second order, n times
S R^2 - eps R^6 Var(s); it is shared out in proportion to the variance.
Measured against sampling in tests/rules/test_layer_norm.py: widths 8 to 1024, noise of 1 % to three times
the spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments
from momentprop.rules.families import only_random
from momentprop.rules.linearization import Diagonal, Linearization, Mapped, Propagated, mapped
from momentprop.rules.registry import rule

aten = torch.ops.aten

_EXACTNESS = "approximate: statistics to second order; uncorrelated inputs"


@dataclass(frozen=True)
class Statistics:
    """Holds what normalising x over the dimensions `dims` needs, each kept as a dimension of size one."""

    dims: list[int]
    count: Any
    center: bool
    share: float  # of V that is left in the spread: 1 - 1/n
    scale: Tensor  # R
    direction: Tensor  # u

    @staticmethod
    def of(x: Moments, dims: list[int], center: bool, eps: float) -> Statistics:
        count = 1
        for d in dims:
            count = count * x.shape[d]
        mean = x.mean - x.mean.mean(dims, keepdim=True) if center else x.mean
        share = (count - 1) / count if center else 1.0
        spread = (mean * mean + share * x.variance).mean(dims, keepdim=True)
        scale = (spread + eps).rsqrt()
        return Statistics(dims, count, center, share, scale, mean * scale)

    def moments(self, x: Moments) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of d r, its variance to first order, and noise beyond that."""
        u, n = self.direction, self.count
        relative = x.variance * (self.scale * self.scale)  # V R^2
        squares = u * u
        jitter = (relative * (4 * squares + 2 * relative)).sum(self.dims, keepdim=True) / (n * n)
        # bounded: in small samples of very noisy elements the expansion ends too early
        factor = (1 + (0.375 * jitter).clamp_max(1.0) - (relative / n).clamp_max(0.5)).clamp(0.5, 2.0)
        own = relative * (1 - 2 * self._own() / n)
        common = (relative * squares).sum(self.dims, keepdim=True) * squares
        if self.center:
            cross = (relative * u).sum(self.dims, keepdim=True)
            common = common + relative.sum(self.dims, keepdim=True) + 2 * cross * u
        mean, variance = u * factor, (own + common / (n * n)).clamp_min(0)
        # y has length sqrt(n) whatever x is, but for eps; what falls short of it is noise of second order
        length = (squares + self.share * relative).mean(self.dims, keepdim=True)  # S / (S + eps)
        length = length - (1 - length) * jitter  # E[s / (s + eps)]
        missing = length - (mean * mean + variance).mean(self.dims, keepdim=True)
        known = variance.mean(self.dims, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)
        return mean, variance, variance * (missing / known).clamp(0, 1)

    def _own(self) -> Tensor:
        squares = self.direction * self.direction
        return 1 + squares if self.center else squares

    def pull(self, cotangent: Tensor) -> Tensor:
        """J^T c, the same J as its transpose."""
        dims, u = [d + 1 for d in self.dims], self.direction
        back = cotangent - u * (cotangent * u).mean(dims, keepdim=True)
        if self.center:
            back = back - cotangent.mean(dims, keepdim=True)
        return back * self.scale


def _normalize(
    x: Moments, dims: list[int], weight: Any, bias: Any, eps: float, center: bool = True
) -> Propagated:
    statistics = Statistics.of(x, dims, center, eps)
    mean, explained, noise = statistics.moments(x)
    if weight is not None:
        square = weight * weight
        mean, explained, noise = mean * weight, explained * square, noise * square
    out = Moments(mean if bias is None else mean + bias, explained + noise)

    def pull(cotangent: Tensor) -> list[Tensor]:
        return [statistics.pull(cotangent if weight is None else cotangent * weight)]

    return Propagated(out, lambda: mapped(pull, noise))


def _last(x: Moments, shape: list[int]) -> list[int]:
    n = x.mean.dim()
    return list(range(n - len(shape), n))


@rule(
    aten.layer_norm.default,
    exactness=_EXACTNESS,
    reference="second order",
    refuses=only_random("input"),
)
def layer_norm(
    x: Moments,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Propagated:
    return _normalize(x, _last(x, normalized_shape), weight, bias, eps)


@rule(
    aten.rms_norm.default,
    exactness=_EXACTNESS,
    reference="second order",
    refuses=only_random("input"),
)
def rms_norm(
    x: Moments, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Propagated:
    floor = torch.finfo(x.dtype).eps if eps is None else eps
    return _normalize(x, _last(x, normalized_shape), weight, None, floor, center=False)


def _per_channel(parameter: Tensor | None, x: Tensor, groups: int) -> Tensor | None:
    if parameter is None:
        return None
    return parameter.reshape(1, groups, -1, *[1] * (x.dim() - 2))


def _group_norm(x: Moments, groups: int, weight: Any, bias: Any, eps: float) -> Propagated:
    """Normalised as [N, groups, C / groups, ...]."""
    inner = Moments(x.mean.unflatten(1, (groups, -1)), x.variance.unflatten(1, (groups, -1)))
    dims = list(range(2, inner.mean.dim()))
    weight, bias = (_per_channel(p, x.mean, groups) for p in (weight, bias))
    found, shape = _normalize(inner, dims, weight, bias, eps), x.shape

    def linearize() -> Linearization:
        assert found.linearize is not None
        grouped = found.linearize()
        (noise,), transposed = grouped.noise, grouped.map
        assert isinstance(noise, Diagonal)
        assert isinstance(transposed, Mapped)

        def pull(cotangent: Tensor) -> list[Tensor]:
            return [transposed.pull(cotangent.unflatten(2, (groups, -1)))[0].reshape(cotangent.shape)]

        return mapped(pull, noise.variance.reshape(shape))

    out: Moments = found.moments
    return Propagated(Moments(out.mean.reshape(shape), out.variance.reshape(shape)), linearize)


@rule(
    aten.group_norm.default,
    exactness=_EXACTNESS,
    reference="second order",
    refuses=only_random("input"),
)
def group_norm(
    x: Moments,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Propagated:
    return _group_norm(x, num_groups, weight, bias, eps)


def _refuses_running(arguments: Mapping[str, Any], random: frozenset[str]) -> str | None:
    if not arguments["use_input_stats"]:
        return "with running statistics it has no rule"
    return only_random("input")(arguments, random)


@rule(
    aten.instance_norm.default,
    exactness=_EXACTNESS,
    reference="second order",
    refuses=_refuses_running,
)
def instance_norm(
    x: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Propagated:
    """Group norm with a group for every channel."""
    return _group_norm(x, x.shape[1], weight, bias, eps)
