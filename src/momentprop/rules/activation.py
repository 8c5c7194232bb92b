"""Activations, element by element, on Gaussian inputs."""

from __future__ import annotations

import torch

from momentprop.gaussian import positive_probability, relu_moments
from momentprop.rules.families import elementwise

aten = torch.ops.aten

elementwise(aten.relu.default, relu_moments, gain=positive_probability, reference="paper, ReLU")
