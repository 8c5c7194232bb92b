"""Activations, element by element, on Gaussian inputs."""

from __future__ import annotations

import torch

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
