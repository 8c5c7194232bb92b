"""Adaptive max pooling becomes max pooling, whether or not its windows are all of one size."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import momentprop as mp
from momentprop.capture.trace import trace
from momentprop.passes.canonical import CANONICAL
from networks import Apply
from passed import operators, passed

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("sizes", "counts", "few"),
    [
        ((12, 6), (4, 1), True),  # whole windows
        ((5, 15), (3, 7), True),  # the border cuts the first and the last off; overlapping ones
        ((7, 12), (5, 6), False),  # windows of two lengths
        ((3, 4), (5, 6), False),  # more windows than elements
    ],
)
def test_the_same_values(sizes, counts, few):
    x = torch.randn(2, 3, *sizes, dtype=torch.float64)
    made = passed(trace(Apply(lambda x: F.adaptive_max_pool2d(x, counts), "f"), x), CANONICAL)
    assert aten.max_pool2d.default in operators(made)
    assert (operators(made) == [aten.max_pool2d.default]) is few
    (out,) = torch.fx.GraphModule(made.root, made.graph)(x)
    torch.testing.assert_close(out, F.adaptive_max_pool2d(x, counts), atol=0, rtol=0)


@pytest.mark.parametrize("tier", ["paper", "fast", "accurate"])
@pytest.mark.parametrize("count", [3, 4], ids=["regular", "two lengths"])
def test_noise_goes_through(tier, count):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Dropout(0.3), nn.Linear(40, 5), nn.Unflatten(1, (1, 5)), nn.AdaptiveMaxPool1d(count), nn.Flatten()
    )
    model, x = model.eval(), torch.randn(4, 40)
    out, mc = mp.convert(model, x, tier)(x), mp.monte_carlo(model, x, 4000)
    ratio = out.std / mc.std
    assert (ratio > 0.75).all()
    assert (ratio < 1.25).all()
    assert ((out.mean - mc.mean).abs() / mc.std).max() < 0.25


def test_windows_over_a_size_that_varies_are_refused():
    model = nn.Sequential(nn.Dropout(0.3), Apply(lambda x: F.adaptive_max_pool1d(x.T, 2).T, "pool"))
    with pytest.raises(mp.MissingRuleError, match="its values are used"):
        mp.convert(model, torch.randn(6, 4), "fast")
