"""Convolutions, plain and transposed: mean `conv(E, w) + b`, variance `conv(V, w*w)`."""

from __future__ import annotations

import torch

from momentprop.rules.families import linear_map

aten = torch.ops.aten

linear_map(
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.convolution.default,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)
