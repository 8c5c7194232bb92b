"""Layers with random weights: found in the graph, and their moments against sampling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop import tiers
from momentprop.capture.trace import trace
from momentprop.passes.canonical.random_weights import fold_random_weights
from momentprop.passes.runner import run


class Layer(nn.Module):
    """A layer given by a function of input, weight and bias."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)
        self.bias = nn.Parameter(torch.randn(shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


class Drop(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, 0.3, self.training)


def parametrized(layer: nn.Module) -> nn.Module:
    nn.utils.parametrize.register_parametrization(layer, "weight", Drop())
    return layer


def drop(weight: Tensor) -> Tensor:
    return F.dropout(weight, 0.3, True)


def masked(weight: Tensor) -> Tensor:
    return weight * torch.bernoulli(torch.full_like(weight, 0.7))


def noisy(weight: Tensor) -> Tensor:
    return weight + 0.2 * F.softplus(weight) * torch.randn_like(weight)


def dense(n: int, m: int) -> nn.Module:
    return Layer(lambda x, w, b: F.linear(x, drop(w), b), m, n)


NETWORKS = {
    "dropped": (lambda: nn.Sequential(dense(8, 16), nn.ReLU(), dense(16, 3)), (8,)),
    "with the bias": (lambda: Layer(lambda x, w, b: F.linear(x, drop(w), drop(b)), 3, 8), (8,)),
    "masked": (lambda: Layer(lambda x, w, b: F.linear(x, masked(w), b), 3, 8), (8,)),
    "normal weights": (lambda: Layer(lambda x, w, b: F.linear(x, noisy(w), noisy(b)), 3, 8), (8,)),
    "a product": (lambda: Layer(lambda x, w, b: x @ drop(w).T + b, 3, 8), (8,)),
    "parametrized": (lambda: parametrized(nn.Linear(8, 3)), (8,)),
    "tokens": (lambda: nn.Sequential(dense(8, 8), nn.ReLU(), dense(8, 2), nn.Flatten()), (4, 8)),
    "convolution": (
        lambda: nn.Sequential(
            Layer(lambda x, w, b: F.conv2d(x, drop(w), b, padding="same"), 4, 2, 3, 3),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 2),
        ),
        (2, 4, 4),
    ),
    "convolution, 1d": (lambda: Layer(lambda x, w, b: F.conv1d(x, drop(w), b), 2, 3, 2), (3, 5)),
}


@pytest.mark.parametrize(("make", "shape"), NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("fidelity", ["fast", "accurate"])
def test_agrees_with_sampling(make, shape, fidelity) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(3, *shape)
    out = mp.convert(model, x, fidelity=fidelity)(x)
    mc = mp.monte_carlo(model, x, n_samples=4000)
    ratio = out.std / mc.std
    low, high = (0.85, 1.15) if fidelity == "accurate" else (0.75, 1.3)
    assert low < ratio.min()
    assert ratio.max() < high
    assert ((out.mean - mc.mean).abs() / mc.std).max() < 0.15
    if fidelity == "accurate":
        samples = mc.samples.flatten(2).double()
        for b in range(3):
            expected = torch.cov(samples[:, b].T)
            scale = expected.diagonal().sqrt()
            error = (out.covariance[b].double() - expected).abs() / (scale[:, None] * scale)
            assert error.max() < 0.3


def test_one_layer_is_exact() -> None:
    model, x = dense(6, 3).double(), torch.randn(4, 6, dtype=torch.float64)
    out = mp.convert(model, x)(x)
    torch.testing.assert_close(out.mean, F.linear(x, model.weight, model.bias))
    torch.testing.assert_close(out.variance, F.linear(x**2, model.weight**2) * 0.3 / 0.7)
    (out.variance.sum() + out.mean.sum()).backward()
    assert model.weight.grad.isfinite().all()


def test_time_first() -> None:
    """Tokens [time, batch, units] share their weights too."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = dense(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).mean(0)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4, 6)
    out = mp.convert(model, x, fidelity="accurate")(x)
    mc = mp.monte_carlo(model, x, n_samples=4000)
    assert ((out.variance - mc.variance).abs() <= 5 * mc.variance_error).all()


class Rows(nn.Module):
    """A mask per row: elements of the weight are not independent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(3, 4)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, self.weight * F.dropout(torch.ones(3, 1), 0.3, True)))


class WeightDropped(nn.Module):
    """Recurrent weights dropped once for all steps (Merity et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.w_ih = nn.Parameter(torch.randn(32, 4) / 2)
        self.w_hh = nn.Parameter(torch.randn(32, 8) / 3)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        zero = torch.zeros(1, x.shape[0], 8)
        weights = [self.w_ih, drop(self.w_hh)]
        y = torch.lstm(x, (zero, zero), weights, False, 1, 0.0, False, False, True)[0]
        return self.out(y[:, -1])


@pytest.mark.parametrize(("model", "shape"), [(Rows, (4,)), (WeightDropped, (5, 4))])
def test_weights_that_share_noise(model: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Not one operator: their noise stays in the graph, and samples are taken one by one."""
    torch.manual_seed(0)
    network, x = model(), torch.randn(3, *shape)
    assert mp.convert(network, x, fidelity="fast")(x).variance.min() > 0
    out = mp.convert(network, x, fidelity="accurate")(x)
    mc = mp.monte_carlo(network, x, n_samples=4000)
    assert ((out.std / mc.std) - 1).abs().max() < 0.1
    assert ((out.mean - mc.mean).abs() / mc.std).max() < 0.15


def test_other_graphs_stay_as_they_are() -> None:
    traced = trace(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 2)), torch.randn(2, 3))
    folding = fold_random_weights(traced.graph, traced.input_nodes, tiers.ACCURATE.rules)
    before = str(traced.graph)
    run(traced.graph, [folding], traced.input_nodes)
    assert str(traced.graph) == before


def test_no_weights_are_drawn() -> None:
    """Behind a product of random matrices, nothing draws weights: the same call gives the same numbers."""
    torch.manual_seed(0)
    product = Layer(lambda x, w, b: (x @ x.mT).flatten(1) @ w, 4, 4)
    model = nn.Sequential(nn.Dropout(0.3), product, dense(4, 1), nn.Tanh()).eval()
    x = torch.randn(3, 2, 4)
    bnn = mp.convert(model, x, "accurate")
    covariance = bnn(x).covariance
    assert torch.equal(covariance, bnn(x).covariance)
    torch.testing.assert_close(bnn(x[1:2]).covariance[0], covariance[1])
