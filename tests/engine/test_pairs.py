"""One and two dropped inputs, against the enumeration of all masks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.engine import pairs
from momentprop.engine.pairs import Answers, answers


def layer(n_inputs: int, n_units: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_inputs)
    shapes = ((3, n_inputs), (n_units, n_inputs), (n_units,))
    x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x * 3, weight, bias


def enumerated(x: Tensor, p: float, function) -> tuple[Tensor, Tensor]:
    """Mean [batch, units] and covariance [batch, units, units] over all masks."""
    masks = torch.tensor(list(itertools.product((0.0, 1.0), repeat=x.shape[-1])), dtype=x.dtype)
    chances = (masks * (1 - p) + (1 - masks) * p).prod(1)
    values = torch.stack([function(x * mask / (1 - p)) for mask in masks])
    mean = torch.einsum("m,mbk->bk", chances, values)
    return mean, torch.einsum("m,mbk,mbl->bkl", chances, values - mean, values - mean)


def covariance(found: Answers) -> Tensor:
    every = torch.cat([found.single, found.double], -1)
    return every @ every.mT


@pytest.mark.parametrize("n_inputs", [1, 2])
@pytest.mark.parametrize("p", [0.005, 0.3])
@pytest.mark.parametrize("activation", [torch.relu, torch.tanh, F.leaky_relu])
def test_exact_for_two_inputs(n_inputs: int, p: float, activation) -> None:
    x, weight, bias = layer(n_inputs)
    found = answers(activation, x, p, weight, bias)
    mean, expected = enumerated(x, p, lambda v: activation(v @ weight.T + bias))
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(covariance(found), expected)
    torch.testing.assert_close(found.variance, expected.diagonal(dim1=1, dim2=2))


def test_exact_without_curvature() -> None:
    """For the identity no two inputs act together, however many there are."""
    x, weight, _ = layer(9)
    found = answers(lambda z: z, x, 0.2, weight, None)
    mean, expected = enumerated(x, 0.2, lambda v: v @ weight.T)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(covariance(found), expected)
    assert found.double.abs().max() < 1e-12


@pytest.mark.parametrize(("p", "bound"), [(0.005, 0.001), (0.05, 0.02), (0.15, 0.06)])
def test_close_while_three_dropped_inputs_are_rare(p: float, bound: float) -> None:
    x, weight, bias = layer(9, 20)
    found = answers(torch.relu, x, p, weight, bias)
    mean, expected = enumerated(x, p, lambda v: torch.relu(v @ weight.T + bias))
    directions = torch.randn(20, 30, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    ours, exact = (
        (directions.T @ c @ directions).diagonal(dim1=1, dim2=2).sqrt() for c in (covariance(found), expected)
    )
    assert ((ours / exact - 1).abs() < bound).all()
    assert (((found.mean - mean) @ directions).abs() < bound * exact).all()


def test_pays_while_dropped_inputs_are_few() -> None:
    assert pairs.pays(16, 0.005)
    assert pairs.pays(13, 0.1)
    assert not pairs.pays(13, 0.2)
    assert not pairs.pays(4, 0.5)
    assert not pairs.pays(100, 0.001)


def test_float32_is_close_to_float64() -> None:
    x, weight, bias = layer(12)
    exact = answers(torch.relu, x, 0.01, weight, bias)
    found = answers(torch.relu, x.float(), 0.01, weight.float(), bias.float())
    torch.testing.assert_close(found.mean.double(), exact.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.variance.double(), exact.variance, rtol=1e-4, atol=1e-8)


def test_networks_whose_inputs_cancel() -> None:
    """Like Naval's: large weights on inputs that are nearly the same, small p. Within 2 % of MC's std."""
    generator = torch.Generator().manual_seed(0)
    common, own = (torch.randn(30, n, generator=generator, dtype=torch.float64) for n in (1, 8))
    x = common + 0.1 * own
    model = nn.Sequential(nn.Dropout(0.01), nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 1)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    mean, expected = enumerated(x, 0.01, model[1:])
    out = mp.convert(model, x, "accurate")(x)
    std = expected[:, 0].sqrt()
    assert ((out.std / std - 1).abs() < 0.02).all()
    assert ((out.mean - mean).abs() < 0.02 * std).all()
