"""The jump response against the enumeration of all masks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.engine import jump
from momentprop.engine.jump import Jump, pays
from momentprop.network import inside
from momentprop.rules.registry import RULES

RELU = RULES.find(torch.ops.aten.relu.default)


def layer(n_inputs: int, n_units: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [2, n], weight and bias, in float64, with contributions of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, n_inputs), (n_units,)))
    weight = torch.randn(n_units, n_inputs, generator=generator, dtype=torch.float64)
    return x * 3, weight, bias


def enumerated(x: Tensor, p: float, function) -> tuple[Tensor, Tensor, Tensor]:
    """All masks [m, n], their probabilities, and the function's values [m, batch, ...]."""
    masks = torch.tensor(list(itertools.product((0.0, 1.0), repeat=x.shape[-1])), dtype=x.dtype)
    probabilities = (masks * (1 - p) + (1 - masks) * p).prod(1)
    return masks, probabilities, torch.stack([function(x * mask / (1 - p)) for mask in masks])


def moments_of(probabilities: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [batch, k] and covariance [batch, k, k]."""
    mean = torch.einsum("m,mbk->bk", probabilities, values)
    deviation = values - mean
    return mean, torch.einsum("m,mbk,mbl->bkl", probabilities, deviation, deviation)


@pytest.mark.parametrize("p", [0.005, 0.3])
def test_exact_where_one_input_contributes(p: float) -> None:
    """Mean, variance, and the response."""
    x, weight, bias = layer(3, 4)
    weight[:, :2] = 0
    found = Jump(RELU).propagate(mp.Moments(x, 0.0), p, weight, bias)
    out, (_, drops, _) = found.moments, found.linearize().noise
    responses = drops.along(torch.eye(4, dtype=x.dtype)[:, None, :].expand(4, 2, 4)).transpose(0, 1)
    masks, probabilities, values = enumerated(x, p, lambda v: torch.relu(v @ weight.T + bias))
    mean, covariance = moments_of(probabilities, values)
    torch.testing.assert_close(out.mean, mean)
    torch.testing.assert_close(out.variance, covariance.diagonal(dim1=1, dim2=2))
    kept = masks[:, 2] == 1
    jump = (values[kept][0] - values[~kept][0]) * (p * (1 - p)) ** 0.5
    torch.testing.assert_close(responses, F.pad(jump[..., None], (2, 0)))


@pytest.mark.parametrize("p", [0.25, 0.4])
def test_jumps_that_are_not_rare(p: float) -> None:
    """Close to the enumeration of all masks for few inputs, which are no Gaussian."""
    x, weight, bias = layer(9, 20)
    out = Jump(RELU).propagate(x, p, weight, bias).moments
    _, probabilities, values = enumerated(x, p, lambda v: torch.relu(v @ weight.T + bias))
    mean, covariance = moments_of(probabilities, values)
    std = covariance.diagonal(dim1=1, dim2=2).sqrt()
    seen = std > 0.1 * std.amax()
    assert ((out.std / std - 1).abs()[seen] < 0.1).all()
    assert ((out.mean - mean).abs()[seen] < 0.05 * std[seen]).all()


def test_noise_and_responses_make_up_the_variance() -> None:
    x, weight, bias = layer(7, 5)
    op = Jump(RELU)
    for given in (x, mp.Moments(x, 0.3)):
        found = op.propagate(given, 0.3, weight, bias)
        out, linearization = found.moments, found.linearize()
        own, *drops = linearization.noise
        unit = torch.eye(5, dtype=x.dtype)[:, None, :].expand(5, 2, 5)
        total = own.variance + sum(d.along(unit).square().sum(-1).T for d in drops)
        for pulled in linearization.map.pull(unit):
            total = total + (pulled.square() * given.variance).sum(-1).T
        assert (out.variance <= total * (1 + 1e-12)).all()
        exact = own.variance > 0
        assert exact.any()
        torch.testing.assert_close(total[exact], out.variance[exact])


def rare_jumps(p: float = 0.02) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(p), nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)).double().eval()
    nn.init.normal_(model[1].weight, std=2.0)
    return model


def test_covariance_of_rare_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 3 % of the enumeration of all masks, where gains are far off."""
    model, x = rare_jumps(), torch.randn(8, 6).double()
    _, probabilities, values = enumerated(x, 0.02, lambda v: model[1:](v))
    mean, covariance = moments_of(probabilities, values)
    std = covariance.diagonal(dim1=1, dim2=2).sqrt()
    out = mp.convert(model, x)(x)
    assert ((out.std / std - 1).abs() < 0.03).all()
    assert ((out.mean - mean).abs() < 0.03 * std).all()
    difference = (out.covariance - covariance).abs() / (std[:, :, None] * std[:, None, :])
    assert (difference < 0.06).all()
    monkeypatch.setattr(jump, "pays", lambda *_: False)
    assert ((mp.convert(model, x)(x).std / std - 1).abs() > 0.1).any()


def test_uncertain_inputs_agree_with_sampling() -> None:
    model, x = rare_jumps(0.1), mp.Moments(torch.randn(4, 6).double(), 0.2)
    mc = mp.monte_carlo(model, x, n_samples=20_000)
    out = mp.convert(model, x)(x)
    assert ((out.std / mc.std - 1).abs() < 0.05).all()
    assert ((out.mean - mc.mean).abs() < 0.05 * mc.std).all()


def jumps_of(model: nn.Module, x: Tensor) -> int:
    plan = inside(mp.convert(model, x)).built.program.plan
    return sum(isinstance(step.operator, Jump) for step in plan.steps)


def test_used_where_it_pays() -> None:
    assert pays(16, 50, 0.005)
    assert not pays(16, 50, 0.3)  # the sum of so many drops is Gaussian
    assert not pays(1000, 50, 0.001)  # one evaluation per weight would cost too much
    x = torch.zeros(1, 6)
    assert jumps_of(rare_jumps().float(), x) == 1

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.linear = nn.Dropout(0.01), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(self.drop(x))
            return torch.relu(h) + h.sum(1, keepdim=True)  # what the activation takes is used twice

    assert jumps_of(Shared().eval(), x) == 0


def test_gradients_are_finite_at_zero_inputs() -> None:
    model = rare_jumps()
    out = mp.convert(model, torch.zeros(1, 6).double())(torch.zeros(3, 6).double())
    (out.mean.sum() + out.covariance.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Softplus, nn.LeakyReLU, nn.Hardsigmoid])
def test_noise_that_is_small_beside_the_mean(activation: type[nn.Module]) -> None:
    """Std 1e-4 of the mean in float32: as in float64 to 1e-3. As a difference of squares nothing was left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 16), activation(), nn.Linear(16, 3)).eval()
    x = torch.randn(4, 16) * 1e-3
    with torch.no_grad():
        narrow = mp.convert(model, x, "accurate")(x).variance
        silent = mp.convert(model, x, "accurate")(x * 0).variance
        wide = mp.convert(model.double(), x.double(), "accurate")(x.double()).variance
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-3, atol=1e-3 * float(wide.max()))
    assert (silent < 1e-13).all()
