"""Activations, element by element, on Gaussian inputs.

Error bounds are stated relative to what the activation can make of its input: those of the mean to the
largest std of the output over all means, those of std likewise, those of the gain absolutely. Quadrature is
good as long as the activation is smooth on the scale of the input's std, here written s. (Around a kink it
needs s to be at least the distance of its points: 0.005 in float32, 1e-5 in float64.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian import closed_forms as analytic
from momentprop.gaussian import logistic, positive
from momentprop.gaussian.composites import relu_moments
from momentprop.gaussian.normal import positive_probability
from momentprop.gaussian.piecewise import piecewise_linear
from momentprop.gaussian.quadrature import expectation, gauss_hermite
from momentprop.graph.private import OpOverload
from momentprop.rules.families import elementwise

aten = torch.ops.aten

Response = tuple[Tensor, Tensor, Tensor]

_SMOOTH = "approximate: to 0.3 % for s <= 1, 1 % for s <= 3, 3 % for s <= 10, if Gaussian"
_KINKED = "approximate: to 2 % for s <= 3, 3 % for s <= 10, if Gaussian"
_STEP = "approximate: to 0.2 % for s <= 1, 2 % for s <= 2, 15 % for s <= 10, if Gaussian"
_POSITIVE = "exact for log-normal inputs"


# Piecewise linear: exact.

elementwise(aten.relu.default, relu_moments, gain=positive_probability, reference="paper, ReLU")


def _linear_pieces(op: OpOverload, pieces: Callable[..., tuple[list[Any], ...]]) -> None:
    """`pieces` makes knots and lines, and jumps if there are any, of the operator's further arguments."""

    def response(mean: Tensor, variance: Tensor, *args: Any, **kwargs: Any) -> Response:
        return piecewise_linear(mean, variance, *pieces(*args, **kwargs))

    elementwise(op, response=response, reference="piecewise linear")


def _bend(left: Any, right: Any = 1.0) -> tuple[list[Any], ...]:
    """Two slopes that meet at 0."""
    return [0.0], [(0.0, left), (0.0, right)]


def _clamp(low: Any = None, high: Any = None) -> tuple[list[Any], ...]:
    if low is None or high is None:
        return ([high], [(0.0, 1.0), (high, 0.0)]) if low is None else ([low], [(low, 0.0), (0.0, 1.0)])
    return [low, high], [(low, 0.0), (0.0, 1.0), (high, 0.0)]


def _shrink(lambd: float, kept: float, jump: float) -> tuple[list[Any], ...]:
    """0 around 0, and the identity less `kept` outside."""
    return [-lambd, lambd], [(kept, 1.0), (0.0, 0.0), (-kept, 1.0)], [jump, jump]


_linear_pieces(aten.leaky_relu.default, lambda slope=0.01: _bend(slope))
_linear_pieces(aten.abs.default, lambda: _bend(-1.0))
_linear_pieces(aten.relu6.default, lambda: _clamp(0.0, 6.0))
_linear_pieces(aten.hardtanh.default, lambda low=-1.0, high=1.0: _clamp(low, high))
_linear_pieces(aten.hardsigmoid.default, lambda: ([-3.0, 3.0], [(0.0, 0.0), (0.5, 1 / 6), (1.0, 0.0)]))
_linear_pieces(aten.clamp.default, _clamp)
_linear_pieces(aten.clamp.Tensor, _clamp)
_linear_pieces(aten.clamp_min.default, lambda low: _clamp(low, None))
_linear_pieces(aten.clamp_min.Tensor, lambda low: _clamp(low, None))
_linear_pieces(aten.clamp_max.default, lambda high: _clamp(None, high))
_linear_pieces(aten.clamp_max.Tensor, lambda high: _clamp(None, high))
_linear_pieces(aten.softshrink.default, lambda lambd=0.5: _shrink(lambd, lambd, 0.0))
_linear_pieces(aten.hardshrink.default, lambda lambd=0.5: _shrink(lambd, 0.0, lambd))
_linear_pieces(aten.threshold.default, lambda t, value: ([t], [(value, 0.0), (0.0, 1.0)], [t - value]))


def _prelu(mean: Tensor, variance: Tensor, weight: Tensor) -> Response:
    """One slope for all, or one per channel, which is the second dimension."""
    if weight.numel() > 1:
        weight = weight.reshape(-1, *[1] * (mean.dim() - 2))
    return piecewise_linear(mean, variance, *_bend(weight))


elementwise(aten.prelu.default, response=_prelu, reference="piecewise linear")

# Closed forms.

elementwise(aten.exp.default, response=analytic.exp_response, reference="log-normal")
elementwise(aten.expm1.default, response=analytic.expm1_response, reference="log-normal")
elementwise(aten.sin.default, response=analytic.sin_response, reference="characteristic function")
elementwise(aten.cos.default, response=analytic.cos_response, reference="characteristic function")
elementwise(aten.square.default, response=analytic.square_response, reference="fourth moment")
elementwise(aten.erf.default, response=analytic.erf_response, reference="Price's theorem")
elementwise(
    aten.sigmoid.default,
    response=logistic.sigmoid_response,
    exactness="approximate: mean to 1e-8, std to 0.1 % for s <= 10, if Gaussian",
    reference="Monahan & Stefanski 1992",
    is_head=True,
)
elementwise(
    aten.tanh.default,
    response=logistic.tanh_response,
    exactness="approximate: mean to 1e-8, std to 0.1 % for s <= 10, if Gaussian",
    reference="Monahan & Stefanski 1992",
)

# Positive quantities.

for _op, _response in (
    (aten.log.default, positive.log_response),
    (aten.log1p.default, positive.log1p_response),
    (aten.sqrt.default, positive.sqrt_response),
    (aten.rsqrt.default, positive.rsqrt_response),
    (aten.reciprocal.default, positive.reciprocal_response),
):
    elementwise(_op, response=_response, exactness=_POSITIVE, reference="log-normal match")

_FIVE = gauss_hermite(5)


def _power(mean: Tensor, variance: Tensor, exponent: float) -> Response:
    """Whole powers of a Gaussian, others of a positive quantity."""
    if exponent == 2:
        return analytic.square_response(mean, variance)
    if exponent == -1:
        return positive.reciprocal_response(mean, variance)
    if exponent < 0 or exponent != int(exponent):
        return positive.power_response(mean, variance, exponent)
    if exponent <= 4:  # n points are exact up to the power 2 n - 1, and the variance needs twice the exponent
        return expectation(lambda x: torch.pow(x, exponent), mean, variance, _FIVE)
    return expectation(lambda x: torch.pow(x, exponent), mean, variance)


elementwise(
    aten.pow.Tensor_Scalar,
    response=_power,
    exactness="exact for Gaussian inputs up to the 12th power; for others, exact for log-normal inputs",
    reference="quadrature; log-normal match",
)

# Quadrature.

elementwise(
    aten.gelu.default,
    response=analytic.gelu_response,
    exactness="approximate: mean exact (tanh form: as std), std to 0.1 % for s <= 1, 1 % for s <= 3, "
    "4 % for s <= 10, if Gaussian",
    reference="closed form, quadrature",
)
for _op in (
    aten.silu.default,
    aten.mish.default,
    aten.softplus.default,
    aten.log_sigmoid.default,
    aten.celu.default,
):
    elementwise(_op, exactness=_SMOOTH)
for _op in (aten.elu.default, aten.selu.default, aten.hardswish.default):
    elementwise(_op, exactness=_KINKED)
elementwise(aten.atan.default, exactness=_STEP)


def activation(op: OpOverload, override: bool = False) -> None:
    """Register the rule of an activation of one's own, in one line.

    The operator itself is averaged over 13 points of a Gaussian input, which gives mean, variance and gain;
    nothing else has to be known about it. It acts element by element on its first argument; any further
    arguments are constants. Good to 1 % where it is smooth on the scale of its input's std.

    >>> import torch, momentprop as mp
    >>> @torch.library.custom_op("docs::bump", mutates_args=())
    ... def bump(x: torch.Tensor) -> torch.Tensor:
    ...     return torch.exp(-x * x)
    >>> _ = bump.register_fake(torch.empty_like)
    >>> mp.activation(torch.ops.docs.bump.default)
    """
    elementwise(op, override=override)
