"""RMS norm is recognised in the ways it is written out."""

import pytest
import torch

import momentprop as mp
from gaussian_layer import Apply
from momentprop.capture.trace import trace
from momentprop.passes.canonical import CANONICAL
from passed import passed

aten = torch.ops.aten


def rms(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def divided(x, w):
    return x / torch.sqrt(torch.mean(x * x, -1, keepdim=True) + 1e-6)


def over_channels(x, w):
    """Layer norm of images, as it is written by hand."""
    x = x.reshape(-1, 4, 3)
    centered = x - x.mean(1, keepdim=True)
    return centered / torch.sqrt(centered.pow(2).mean(1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("function", [rms, divided, over_channels])
def test_rms_norm_is_recognised(function):
    torch.manual_seed(0)
    model, x = Apply(function), mp.Moments(torch.randn(3, 16) * 2, 0.1)
    recognised = passed(trace(model, x), CANONICAL)
    assert any(node.target is aten.rms_norm.default for node in recognised.graph.nodes)
    bnn = mp.convert(model, x, "accurate")
    out, mc = bnn(x), mp.monte_carlo(model, x, 10_000)
    assert ((out.mean - mc.mean).abs() / mc.std).mean() < 0.1
    assert abs((out.std / mc.std).median() - 1) < 0.05


def test_another_mean_is_not_rms_norm():
    for function in (
        lambda x, w: x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
        lambda x, w: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6),
    ):
        recognised = passed(trace(Apply(function), torch.zeros(2, 16)), CANONICAL)
        assert not any(node.target is aten.rms_norm.default for node in recognised.graph.nodes)
