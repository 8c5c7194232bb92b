"""Activations, element by element, on Gaussian inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from momentprop.gaussian import positive_probability, relu_moments, sigmoid_gain, sigmoid_moments
from momentprop.rules.families import elementwise

aten = torch.ops.aten

elementwise(aten.relu.default, relu_moments, gain=positive_probability, reference="paper, ReLU")
elementwise(
    aten.sigmoid.default,
    sigmoid_moments,
    gain=sigmoid_gain,
    exactness="approximate: mean to 1e-8, variance to 0.2 % or 1e-8, if Gaussian",
    reference="Monahan & Stefanski 1992",
    is_head=True,
)
for _op in (
    aten.leaky_relu.default,
    aten.prelu.default,
    aten.relu6.default,
    aten.hardtanh.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.hardsigmoid.default,
    aten.abs.default,
    aten.hardswish.default,
    aten.tanh.default,
    aten.silu.default,
    aten.softplus.default,
    aten.log_sigmoid.default,
    aten.gelu.default,
    aten.selu.default,
    aten.elu.default,
    aten.celu.default,
    aten.mish.default,
    aten.erf.default,
    aten.exp.default,
    aten.sin.default,
    aten.cos.default,
    aten.square.default,
    aten.pow.Tensor_Scalar,
    aten.atan.default,
):
    elementwise(_op)


def activation(op: OpOverload, **options: Any) -> None:
    """Register the rule of an activation of one's own.

    The operator itself is averaged over a few points of a Gaussian input, which gives mean, variance and
    gain; nothing else has to be known about it. It acts element by element on its first argument, any
    further arguments being constants.
    """
    elementwise(op, **options)
