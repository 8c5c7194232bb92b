"""Dense layers: mean `W E + b`, variance `(W*W) V`."""

from __future__ import annotations

import torch
from torch import Tensor

from momentprop.local import Linear
from momentprop.moments import Moments
from momentprop.rules.families import linear_map

aten = torch.ops.aten


def _dense(out: Moments, x: Moments, weight: Tensor, bias: Tensor | None = None) -> Linear:
    return Linear(lambda cotangent: [torch.matmul(cotangent, weight)])


linear_map(aten.linear.default, local=_dense)
