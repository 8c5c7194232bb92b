"""Maxima of dropped values in networks, over window geometries, against all masks and against sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from enumeration import enumerate_masks
from momentprop.moments import Moments
from momentprop.rules.dropped_maxima import dropped_amax, dropped_max_pool
from networks import Apply

OPERATORS = [torch.ops.momentprop.dropped_amax.default, torch.ops.momentprop.dropped_max_pool.default]


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (nn.MaxPool2d(2), (2, 1, 2, 4)),
        (nn.MaxPool2d((3, 2)), (2, 1, 3, 4)),
        (nn.MaxPool1d(4), (2, 2, 5)),
        (nn.MaxPool3d((1, 2, 2)), (2, 1, 1, 2, 4)),
        (nn.AdaptiveMaxPool2d(1), (2, 2, 2, 3)),
        (Apply(lambda x: x.amax(1), "amax"), (2, 4, 2)),
        (Apply(lambda x: x.min(1, keepdim=True).values, "min"), (2, 4, 2)),
        (Apply(lambda x: torch.amax(x, (-1, 1)), "amax of two"), (2, 3, 2, 2)),
    ],
    ids=str,
)
def test_known_values_in_separate_windows_are_exact(
    pool: nn.Module, shape: tuple[int, ...], p: float
) -> None:
    """Mean and covariance over all masks; values of both signs."""
    x = torch.randn(shape, dtype=torch.float64)
    model = nn.Sequential(nn.Dropout(p), pool, nn.Flatten())
    ((mean, covariance),) = enumerate_masks(model.train(), x)
    out = mp.convert(model.eval(), x, "accurate")(x)
    torch.testing.assert_close(out.mean, mean, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(out.covariance, covariance, rtol=1e-6, atol=1e-9)
    fast = mp.convert(model, x, "fast")(x)
    torch.testing.assert_close(fast.variance, out.variance)


OVERLAPPING = [
    (nn.MaxPool2d(2, 1), (3, 1, 2, 4)),
    (nn.MaxPool2d(3, 2, 1), (3, 1, 3, 3)),
    (nn.MaxPool1d(3, 2, 1, ceil_mode=True), (3, 2, 4)),
    (nn.MaxPool1d(2, 1, dilation=2), (3, 1, 8)),
    (nn.MaxPool3d((1, 3, 2), 1), (3, 1, 1, 3, 3)),
]


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(("pool", "shape"), OVERLAPPING, ids=str)
def test_overlapping_windows_share_masks(pool: nn.Module, shape: tuple[int, ...], p: float) -> None:
    """Moments are exact; covariance is that of the responses to single masks."""
    x = torch.randn(shape, dtype=torch.float64)
    model = nn.Sequential(nn.Dropout(p), pool, nn.Flatten())
    ((mean, covariance),) = enumerate_masks(model.train(), x)
    out = mp.convert(model.eval(), x, "accurate")(x)
    torch.testing.assert_close(out.mean, mean, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(out.variance, covariance.diagonal(dim1=1, dim2=2), rtol=1e-6, atol=1e-9)
    scale = (out.variance[:, :, None] * out.variance[:, None, :]).sqrt() + 1e-12
    assert ((out.covariance - covariance).abs() / scale).mean() < (0.02 if p == 0.1 else 0.08)


@pytest.mark.parametrize(("pool", "shape"), OVERLAPPING, ids=str)
def test_responses_are_differences_between_kept_and_dropped(pool: Any, shape: tuple[int, ...]) -> None:
    x, p = torch.randn(shape[1:], dtype=torch.float64)[None], 0.3
    model = nn.Sequential(nn.Dropout(p), pool, nn.Flatten())
    n = x.dim() - 2
    sizes = [pool.kernel_size, pool.stride, pool.padding, pool.dilation]
    geometry = [[s] * n if isinstance(s, int) else list(s) for s in sizes]
    found = dropped_max_pool(x, p, *geometry, pool.ceil_mode)
    size = found.moments.mean.numel()
    rows = torch.eye(size, dtype=x.dtype).reshape(size, *found.moments.shape)
    _, drops = found.linearize().noise
    along = drops.along(rows).reshape(size, -1)
    for i in range(x.numel()):
        kept = [chance_means(model, x, p, i, value) for value in (1.0, 0.0)]
        torch.testing.assert_close(along[:, i], (p * (1 - p)) ** 0.5 * (kept[0] - kept[1]))


def chance_means(model: nn.Sequential, x: Tensor, p: float, i: int, value: float) -> Tensor:
    """The mean of the pooled values over all masks of the others."""
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=x.dtype)] * (x.numel() - 1))
    chances = torch.where(masks > 0, 1 - p, p).to(x.dtype).prod(1)
    masks = torch.cat([masks[:, :i], torch.full_like(masks[:, :1], value), masks[:, i:]], 1)
    pooled = model[1](masks.reshape(-1, *x.shape[1:]) * x / (1 - p)).flatten(1)
    return chances @ pooled


def test_linear_part_and_noise_make_up_the_variance() -> None:
    x = Moments(torch.randn(2, 3, 5, 5).double(), torch.rand(2, 3, 5, 5).double())
    found = dropped_max_pool(x, 0.3, [3, 3], [2, 2], [1, 1], [1, 1], False)
    linearization, n = found.linearize(), found.moments.mean.numel()
    rows = torch.eye(n, dtype=torch.float64).reshape(n, *found.moments.shape)
    (pulled,) = linearization.map.pull(rows)
    noise, drops = linearization.noise
    total = (pulled.flatten(1).square() * x.variance.flatten()).sum(1) + noise.variance.flatten()
    total = total + drops.along(rows).flatten(1).square().sum(1)
    torch.testing.assert_close(total, found.moments.variance.flatten(), rtol=1e-3, atol=1e-3)


class Sampled:
    """A dropout before a maximum in a network, in both tiers against sampling."""

    @staticmethod
    def check(model: nn.Module, x: Tensor, spread: float, center: float) -> None:
        samples = mp.monte_carlo(model.eval(), x, 3000, seed=0)
        for tier in ("fast", "accurate"):
            out = mp.convert(model, x, tier)(x)
            ratio = (out.std / samples.std).median()
            assert 1 - spread < ratio < 1 + spread, tier
            assert ((out.mean - samples.mean) / samples.std).abs().median() < center, tier


def convolutional(*layers: nn.Module, first: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    head = [nn.Dropout(first)] if first else []
    body = nn.Sequential(*head, nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten())
    n = body(torch.randn(1, 3, 12, 12)).shape[1]
    return nn.Sequential(*body, nn.Linear(n, 5))


POOLS = [nn.MaxPool2d(3), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(4), nn.AdaptiveMaxPool2d(1)]


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize(
    "before",
    [
        lambda p: [nn.ReLU(), nn.Dropout(p)],
        lambda p: [nn.Dropout(p), nn.ReLU()],
        lambda p: [nn.Dropout(p), nn.Tanh()],
        lambda p: [nn.Dropout(p), nn.GELU()],
        lambda p: [Apply(lambda x: -x.abs() - 0.1, "negative"), nn.Dropout(p)],
    ],
    ids=["relu dropout", "dropout relu", "dropout tanh", "dropout gelu", "negative"],
)
def test_pooling_in_a_network(before: Any, pool: nn.Module) -> None:
    p = 0.1 if isinstance(pool, nn.AdaptiveMaxPool2d) else 0.3
    model = convolutional(*before(p), pool)
    if isinstance(pool, nn.AdaptiveMaxPool2d) and isinstance(model[1], Apply):
        return  # all but never anything but zero
    Sampled.check(model, torch.randn(8, 3, 12, 12), 0.05, 0.06)


@pytest.mark.parametrize("pool", POOLS[:3], ids=str)
def test_pooling_of_random_values_in_a_network(pool: nn.Module) -> None:
    model = convolutional(nn.ReLU(), nn.Dropout(0.3), pool, first=0.1)
    Sampled.check(model, torch.randn(8, 3, 12, 12), 0.05, 0.1)


@pytest.mark.parametrize("p", [0.1, 0.3])
def test_maximum_over_tokens(p: float) -> None:
    torch.manual_seed(0)
    layers = nn.Embedding(50, 16), nn.Dropout(p), Apply(lambda x: x.transpose(1, 2), "transpose")
    model = nn.Sequential(*layers, Apply(lambda x: x.max(-1).values, "max"), nn.Linear(16, 3))
    Sampled.check(model, torch.randint(0, 50, (8, 20)), 0.05, 0.06)


@pytest.mark.parametrize("function", [torch.maximum, torch.minimum])
def test_the_larger_of_two(function: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            parts = [F.dropout(layer(x), 0.3, self.training) for layer in (self.a, self.b)]
            return self.head(function(*parts))

    torch.manual_seed(0)
    Sampled.check(Model(), torch.randn(8, 8), 0.05, 0.06)


def test_tokens_before_the_batch() -> None:
    """The sweep tells samples apart where the batch is not the first dimension before the maximum."""
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    first = nn.Sequential(nn.Dropout(0.3), Apply(lambda x: x.amax(1), "tokens second"))
    last = nn.Sequential(
        Apply(lambda x: x.transpose(0, 1), "tokens first"),
        nn.Dropout(0.3),
        Apply(lambda x: x.amax(0), "amax"),
    )
    one, other = (mp.convert(model.eval(), x, "accurate")(x) for model in (first, last))
    torch.testing.assert_close(one.covariance, other.covariance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes(dtype: torch.dtype) -> None:
    for scale, p in ((0.0, 0.5), (1e10, 0.1), (1e-20, 0.999), (1.0, 1e-9)):
        mean = torch.randn(2, 3, 6, 6, dtype=dtype) * scale
        for x in (mean, Moments(mean, torch.rand_like(mean) * scale**2)):
            pooled = dropped_max_pool(x, p, [3, 3], [2, 2], [1, 1], [1, 1], True)
            for found in (pooled, dropped_amax(x, p, [2, 3], True)):
                out, noise = found.moments, found.linearize().noise
                assert out.mean.isfinite().all()
                assert out.variance.isfinite().all()
                assert (out.variance >= 0).all()
                assert (noise[0].variance >= 0).all()
                assert noise[1].along(torch.ones_like(out.mean)[None]).isfinite().all()
