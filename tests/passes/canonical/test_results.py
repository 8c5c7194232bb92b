"""One of several results is read by an operator that returns it alone."""

import pytest
import torch
import torch.nn.functional as F

from momentprop.capture.trace import trace
from momentprop.passes.canonical import CANONICAL
from networks import Apply
from passed import operators, passed

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x.max(1).values, aten.amax.default),
        (lambda x: x.min(1, keepdim=True)[0], aten.amin.default),
        (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], aten.max_pool2d.default),
        (lambda x: F.max_pool1d(x[0], 3, 1, return_indices=True)[0], aten.max_pool1d.default),
        (lambda x: F.adaptive_max_pool2d(x, 3), aten.max_pool2d.default),
        (lambda x: torch.var_mean(x, 1, correction=0)[0], aten.var.correction),
        (lambda x: torch.var_mean(x, correction=1)[1], aten.mean.dim),
    ],
)
def test_values_alone(function, op):
    model, x = Apply(function, "f"), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    made = passed(trace(model, x), CANONICAL)
    assert op in operators(made)
    assert len(operators(made)) <= 2
    (out,) = made_outputs(made, x)
    torch.testing.assert_close(out, function(x))


def made_outputs(made, x):
    return torch.fx.GraphModule(made.root, made.graph)(x)


def test_indices_stay():
    before = trace(Apply(lambda x: x.max(1).indices, "f"), torch.randn(2, 3, 6, 6))
    assert operators(passed(before, CANONICAL)) == operators(before)
