"""Softmax and norms of dropped values in networks, against sampling and against the rules apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.moments import Moments
from momentprop.rules.dropped_sums import dropped_norm, dropped_softmax
from networks import Apply

OPERATORS = [torch.ops.momentprop.dropped_softmax.default, torch.ops.momentprop.dropped_norm.default]

KINDS: dict[str, Any] = {
    "softmax": lambda: [nn.Softmax(-1)],
    "log softmax": lambda: [nn.LogSoftmax(-1)],
    "layer norm": lambda: [nn.LayerNorm(64)],
    "RMS norm": lambda: [nn.RMSNorm(64)],
    "sharp softmax": lambda: [Apply(lambda x: 4 * x, "times four"), nn.Softmax(-1)],
    "tanh softmax": lambda: [nn.Tanh(), nn.Softmax(-1)],
    "GELU layer norm": lambda: [nn.GELU(), nn.LayerNorm(64)],
    "layer norm over two dimensions": lambda: [
        nn.Unflatten(1, (8, 8)),
        nn.LayerNorm((8, 8)),
        nn.Flatten(),
    ],
    "softmax over channels": lambda: [nn.Unflatten(1, (16, 4)), nn.Softmax(1), nn.Flatten()],
}


def network(*layers: nn.Module, p: float, front: bool = False) -> nn.Module:
    torch.manual_seed(0)
    before = [nn.Dropout(p)] if front else []
    model = nn.Sequential(*before, nn.Linear(16, 64), nn.Dropout(p), *layers, nn.Linear(64, 3))
    for module in model:
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1, 0.3)
            nn.init.normal_(module.bias)
    return model.eval()


def compared(out: mp.Moments, samples: Any) -> tuple[float, float]:
    ratio = (out.std / samples.std).median().item()
    return ratio, ((out.mean - samples.mean).abs() / samples.std).median().item()


@pytest.mark.parametrize("p", [0.1, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_network(kind: str, p: float) -> None:
    model, x = network(*KINDS[kind](), p=p), torch.randn(8, 16)
    ratio, off = compared(mp.convert(model, x, "accurate")(x), mp.monte_carlo(model, x, 4000, seed=0))
    assert 0.96 < ratio < 1.03
    assert off < 0.03


@pytest.mark.parametrize("kind", ["softmax", "log softmax", "sharp softmax", "tanh softmax"])
def test_fast_tier(kind: str) -> None:
    """Of Gaussians the std is 1.0 to 3.1 of the samples'."""
    model, x = network(*KINDS[kind](), p=0.1), torch.randn(8, 16)
    ratio, off = compared(mp.convert(model, x, "fast")(x), mp.monte_carlo(model, x, 4000, seed=0))
    assert 0.9 < ratio < 1.1
    assert off < 0.03


@pytest.mark.parametrize("p", [0.1, 0.3])
def test_softmax_of_random_values(p: float) -> None:
    model, x = network(nn.Softmax(-1), p=p, front=True), torch.randn(8, 16)
    ratio, off = compared(mp.convert(model, x, "accurate")(x), mp.monte_carlo(model, x, 4000, seed=0))
    assert 0.95 < ratio < 1.08
    assert off < 0.05


class Table(nn.Module):
    """A dropped table is one mask for the whole batch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Parameter(torch.randn(4, 8)), layer, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.layer(nn.functional.dropout(self.table, 0.2, self.training))).mean(1))


@pytest.mark.parametrize("layer", [nn.Softmax(-1), nn.LayerNorm(8)], ids=str)
def test_a_table_without_a_batch(layer: nn.Module) -> None:
    torch.manual_seed(0)
    model, x = Table(layer).eval(), torch.randn(3, 4, 8)
    ratio, off = compared(mp.convert(model, x, "accurate")(x), mp.monte_carlo(model, x, 4000, seed=0))
    assert 0.95 < ratio < 1.05
    assert off < 0.05


class Apart(nn.Module):
    """An operator behind a dropout whose values something else uses as well, to no effect."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0 * x


@pytest.mark.parametrize("kind", ["log softmax", "layer norm", "RMS norm"])
def test_random_values_are_gaussians_dropped_or_not(kind: str) -> None:
    """The covariance is that of dropout and the operator, each with its own rule."""
    (layer,), x = KINDS[kind](), torch.randn(3, 16, dtype=torch.float64)
    models = [network(one, p=0.2, front=True).double() for one in (layer, Apart(layer))]
    joined, apart = (mp.convert(model, x, "accurate")(x) for model in models)
    torch.testing.assert_close(joined.mean, apart.mean)
    torch.testing.assert_close(joined.covariance, apart.covariance)


@pytest.mark.parametrize("kind", ["layer norm", "RMS norm"])
def test_fast_norms_are_those_of_gaussians(kind: str) -> None:
    (layer,), x = KINDS[kind](), torch.randn(3, 16, dtype=torch.float64)
    models = [network(one, p=0.2).double() for one in (layer, Apart(layer))]
    joined, apart = (mp.convert(model, x, "fast")(x) for model in models)
    torch.testing.assert_close(joined.mean, apart.mean)
    torch.testing.assert_close(joined.variance, apart.variance)


@pytest.mark.parametrize("axis", [-2, -1])
def test_any_dimension(axis: int) -> None:
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    found = dropped_softmax(x, 0.3, axis, False)
    moved = dropped_softmax(x.movedim(axis, -1), 0.3, -1, False)
    torch.testing.assert_close(found.moments.mean.movedim(axis, -1), moved.moments.mean)
    rows = torch.randn(3, 2, 5, 7, dtype=torch.float64)
    parts = [found.linearize().noise[1].along(rows), moved.linearize().noise[1].along(rows.movedim(axis, -1))]
    torch.testing.assert_close(parts[0].movedim(axis, -1), parts[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("center", [False, True])
def test_norms_at_extremes(center: bool, dtype: torch.dtype) -> None:
    for scale, p, eps in ((0.0, 0.5, 1e-5), (1e15, 0.1, 1e-5), (1e-15, 0.9, 1e-5), (1.0, 1e-6, 0.0)):
        mean = torch.randn(2, 3, 8, dtype=dtype) * scale
        for x in (mean, Moments(mean, torch.rand_like(mean) * scale**2)):
            found = dropped_norm(x, p, [8], center, eps)
            linear = found.linearize()
            assert found.moments.mean.isfinite().all()
            assert found.moments.variance.isfinite().all()
            assert (found.moments.variance >= 0).all()
            assert all(noise.variance.isfinite().all() for noise in linear.noise[:1])


def test_norms_of_any_scale() -> None:
    x = torch.randn(4, 16)
    one, other = (dropped_norm(s * x, 0.2, [16], True, 0.0).moments for s in (1.0, 1e12))
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.variance, other.variance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "log softmax", "layer norm", "RMS norm"])
@pytest.mark.parametrize("tier", ["fast", "accurate"])
def test_frozen_and_compiled(kind: str, tier: str) -> None:
    model, x = network(*KINDS[kind](), p=0.2), torch.randn(4, 16)
    bnn = mp.convert(model, x, tier)
    out = bnn(x)
    compiled = torch.compile(lambda given: bnn(given).variance, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), out.variance)
    torch.testing.assert_close(bnn.freeze()(x).variance, out.variance)


def test_gradients_reach_parameters() -> None:
    model, x = network(nn.LayerNorm(64), p=0.2), torch.randn(4, 16)
    bnn = mp.convert(model, x, "accurate")
    out = bnn(x)
    (out.mean.sum() + out.variance.sum()).backward()
    gradients: list[Tensor | None] = [parameter.grad for parameter in bnn.parameters()]
    assert gradients
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients)
