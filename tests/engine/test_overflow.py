"""Inputs that float32 cannot square: finite where samples are finite, and as in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import momentprop as mp
from networks import Apply

TIERS = ["paper", "fast", "accurate"]


def dense(function) -> nn.Sequential:
    layers = (nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 16), Apply(function, "f"), nn.Linear(16, 3))
    return nn.Sequential(*layers).eval()


def encoder() -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
    inner = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(nn.Dropout(0.1), inner, nn.Flatten(), nn.Linear(32, 2)).eval()


@pytest.mark.parametrize("size", [1e10, 1e20])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    "function", [F.silu, F.softplus, F.mish, torch.tanh, torch.sigmoid, lambda x: F.normalize(x, dim=-1)]
)
def test_a_sentinel_among_the_inputs(function, tier: str, size: float) -> None:
    model, x = dense(function), torch.randn(4, 8)
    x[:, 0] = size
    out, wide = mp.convert(model, x, tier)(x), mp.convert(dense(function).double(), x.double(), tier)
    wide.load_state_dict(model.double().state_dict())
    expected = wide(x.double())
    for found, true in ((out.mean, expected.mean), (out.std, expected.std)):
        assert found.isfinite().all()
        torch.testing.assert_close(found.double(), true, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("tier", TIERS)
def test_unscaled_inputs_of_a_transformer(tier: str) -> None:
    model, x = encoder(), 1e10 * torch.randn(4, 4, 8)
    out = mp.convert(model, x, tier)(x)
    mc = mp.monte_carlo(model, x, n_samples=200)
    assert mc.mean.isfinite().all()
    assert 0.5 < (out.std / mc.std).median() < 1.25


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    model, x = dense(F.silu), torch.randn(4, 8)
    network = mp.convert(model, x)
    alone, x[1] = network(x), torch.nan
    out = network(x)
    assert out.mean[1].isnan().all()
    torch.testing.assert_close(out.variance[[0, 2, 3]], alone.variance[[0, 2, 3]])


def test_functional_transforms_run_as_before() -> None:
    network, x = mp.convert(dense(F.silu), torch.zeros(1, 8)), torch.randn(4, 8)
    jacobians = torch.vmap(torch.func.jacrev(lambda z: network(z[None]).std[0]))(x)
    assert jacobians.shape == (4, 3, 8)
    graph = make_fx(lambda z: network(z).mean)(x)
    torch.testing.assert_close(graph(x), network(x).mean)
