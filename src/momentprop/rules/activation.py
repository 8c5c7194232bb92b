"""Activations, element by element, on Gaussian inputs."""

from __future__ import annotations

import torch

from momentprop.gaussian import relu_moments
from momentprop.rules.families import elementwise

aten = torch.ops.aten

elementwise(aten.relu.default, relu_moments, reference="paper, ReLU")
