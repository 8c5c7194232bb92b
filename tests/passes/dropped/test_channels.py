"""Channels are normalised before they are dropped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import momentprop as mp
from enumeration import enumerate_masks
from momentprop.capture.trace import trace
from momentprop.passes.rewrites import REWRITES
from passed import operators, passed, run

aten = torch.ops.aten


def norm_of(n: int, affine: bool) -> nn.Module:
    made: nn.Module = getattr(nn, f"InstanceNorm{n}d")(3, eps=0.1, affine=affine)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def dropout_of(n: int, p: float) -> nn.Module:
    dropout: nn.Module = getattr(nn, f"Dropout{n}d")(p)
    return dropout


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_function_is_the_same_for_every_mask(n: int, affine: bool) -> None:
    model = nn.Sequential(dropout_of(n, 0.3), norm_of(n, affine), nn.Flatten()).double().eval()
    inputs = (torch.randn(2, 3, *[4] * n, dtype=torch.float64),)
    before = trace(model, inputs)
    after = passed(before, REWRITES)
    found = operators(after)
    assert found.index(aten.instance_norm.default) < found.index(aten.feature_dropout.default)
    one, other = (run(graph, model, inputs, masked=True) for graph in (before, after))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tier", ["fast", "accurate"])
def test_moments_are_exact(tier: str) -> None:
    """The std of Gaussians was .3 to 1.5 of the samples' in a small network."""
    model = nn.Sequential(dropout_of(2, 0.3), norm_of(2, True), nn.ReLU(), nn.Flatten()).double()
    x = torch.randn(2, 3, 3, 3, dtype=torch.float64)
    ((mean, covariance),) = enumerate_masks(model.train(), x)
    out = mp.convert(model.eval(), x, tier)(x)
    torch.testing.assert_close(out.mean, mean)
    torch.testing.assert_close(out.variance, covariance.diagonal(dim1=1, dim2=2))
    if tier == "accurate":
        torch.testing.assert_close(out.covariance, covariance)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Dropout(0.3), nn.InstanceNorm2d(3)),
        (nn.Dropout2d(0.3), nn.InstanceNorm2d(3, track_running_stats=True)),
        (nn.Dropout2d(0.3), nn.GroupNorm(1, 3)),
    ],
    ids=str,
)
def test_left_alone(layers: tuple[nn.Module, ...]) -> None:
    model = nn.Sequential(*layers, nn.Flatten()).double().eval()
    before = trace(model, (torch.randn(2, 3, 4, 4, dtype=torch.float64),))
    kinds = (aten.dropout.default, aten.feature_dropout.default)
    assert operators(passed(before, REWRITES))[0] in (*kinds, aten.ones_like.default, aten.slice.Tensor)
