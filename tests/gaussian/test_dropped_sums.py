"""Softmax and norms of dropped values, against the enumeration of all masks and against sampling."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from momentprop.gaussian.dropped_sums import (
    DroppedSums,
    Response,
    dropped_sums,
    layer_norm,
    rms_norm,
    softmax,
)

EPS = 1e-5
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda d: d.softmax(-1),
    "log_softmax": lambda d: d.log_softmax(-1),
    "rms_norm": lambda d: torch.rms_norm(d, d.shape[-1:], eps=EPS),
    "layer_norm": lambda d: torch.layer_norm(d, d.shape[-1:], eps=EPS),
}


def found(kind: str, x: Tensor, p: float, variance: Tensor | None = None) -> DroppedSums:
    eps = torch.full_like(x[..., :1], EPS)
    functions = {
        "softmax": softmax(False),
        "log_softmax": softmax(True),
        "rms_norm": rms_norm(eps),
        "layer_norm": layer_norm(eps),
    }
    return dropped_sums(functions[kind], x, variance, p)


def enumerated(kind: str, x: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance over all masks, and responses [..., k, j] of the k-th value to the j-th mask."""
    n = x.shape[-1]
    masks = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n)), dtype=x.dtype)
    kept = masks.sum(1)
    chances = (1 - p) ** kept * p ** (n - kept)
    y = KINDS[kind](masks[:, None] * x / (1 - p))
    mean = torch.einsum("s,sbk->bk", chances, y)
    variance = torch.einsum("s,sbk->bk", chances, (y - mean).square())
    weights = chances[:, None] * (masks / (1 - p) - (1 - masks) / p)
    return mean, variance, torch.einsum("sj,sbk->bkj", weights, y)


def responses(response: Response, x: Tensor) -> Tensor:
    """The responses [..., k, j] row by row."""
    n = x.shape[-1]
    rows = torch.eye(n, dtype=x.dtype)[:, None].expand(n, *x.shape)
    return response.along(rows).movedim(0, -2)


# n: median error of the mean in std, of the std's ratio, and of all responses to masks beside their size
SOFTMAX = {2: (0.001, 0.001, 0.02), 8: (0.005, 0.02, 0.01)}
BOUNDS = {
    "softmax": SOFTMAX,
    "log_softmax": SOFTMAX,
    "rms_norm": {6: (0.02, 0.06, 0.06), 8: (0.015, 0.05, 0.04)},
    "layer_norm": {6: (0.05, 0.13, 0.08), 8: (0.04, 0.1, 0.05)},
}


@pytest.mark.parametrize("p", [0.1, 0.3])
@pytest.mark.parametrize(("kind", "n"), [(kind, n) for kind in BOUNDS for n in BOUNDS[kind]])
def test_known_values_against_all_masks(kind: str, n: int, p: float) -> None:
    x = torch.randn(40, n, dtype=torch.float64)
    mine = found(kind, x, p)
    mean, variance, exact = enumerated(kind, x, p)
    masks, none = mine.linear()
    wrong = (responses(masks, x) - exact).square().sum((-1, -2)) / exact.square().sum((-1, -2))
    bounds = BOUNDS[kind][n]
    assert none is None
    assert ((mine.mean - mean).abs() / variance.sqrt()).median() < bounds[0], "mean"
    assert ((mine.variance / variance).sqrt().median() - 1).abs() < bounds[1], "std"
    assert wrong.median().sqrt() < bounds[2], "responses"


@pytest.mark.parametrize("p", [0.1, 0.3])
@pytest.mark.parametrize("kind", BOUNDS)
def test_many_known_values_agree_with_sampling(kind: str, p: float) -> None:
    """Covariance too, by weighted sums of the values."""
    x, weights = 0.6 * torch.randn(12, 64, dtype=torch.float64), torch.randn(3, 64, dtype=torch.float64)
    mine = found(kind, x, p)
    samples = KINDS[kind](x * (torch.rand(10_000, 12, 64, dtype=x.dtype) >= p) / (1 - p))
    mean, std = samples.mean(0), samples.std(0)
    assert ((mine.mean - mean).abs() / std).median() < 0.02
    assert ((mine.variance.sqrt() / std).median() - 1).abs() < 0.02
    masks, _ = mine.linear()
    explained = masks.variance(p * (1 - p))
    rows = masks.along(weights[:, None].expand(-1, 12, -1))
    noise = (mine.variance - explained).clamp_min(0)
    total = p * (1 - p) * rows.square().sum(-1) + (weights.square()[:, None] * noise).sum(-1)
    sampled = (samples @ weights.T).std(0).T
    assert ((total.sqrt() / sampled).median() - 1).abs() < 0.02


@pytest.mark.parametrize("p", [0.1, 0.3])
def test_softmax_of_random_values_agrees_with_sampling(p: float) -> None:
    x, weights = torch.randn(12, 16, dtype=torch.float64), torch.randn(3, 16, dtype=torch.float64)
    variance = 0.25 * (0.5 + torch.rand_like(x))
    mine = found("softmax", x, p, variance)
    values = x + variance.sqrt() * torch.randn(20_000, *x.shape, dtype=x.dtype)
    samples = (values * (torch.rand_like(values) >= p) / (1 - p)).softmax(-1)
    mean, std = samples.mean(0), samples.std(0)
    assert ((mine.mean - mean).abs() / std).median() < 0.02
    assert ((mine.variance.sqrt() / std).median() - 1).abs() < 0.05
    masks, gains = mine.linear()
    assert gains is not None
    gain = ((values - x).unsqueeze(-2) * samples.unsqueeze(-1)).mean(0) / variance.unsqueeze(-2)
    assert (responses(gains, x) - gain).norm() < 0.15 * gain.norm()
    given = [
        gains.along(weights[:, None].expand(-1, 12, -1)),
        masks.along(weights[:, None].expand(-1, 12, -1)),
    ]
    noise = (mine.variance - masks.variance(p * (1 - p)) - gains.variance(variance)).clamp_min(0)
    total = (given[0].square() * variance + p * (1 - p) * given[1].square()).sum(-1)
    total = total + (weights.square()[:, None] * noise).sum(-1)
    assert ((total.sqrt() / (samples @ weights.T).std(0).T).median() - 1).abs() < 0.04


@pytest.mark.parametrize("variance", [None, 1e-12])
@pytest.mark.parametrize("kind", BOUNDS)
def test_variance_of_a_response_is_that_of_its_rows(kind: str, variance: float | None) -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    given = None if variance is None else torch.full_like(x, variance)
    weights = torch.rand_like(x)
    for response in found(kind, x, 0.3, given).linear():
        if response is not None:
            rows = responses(response, x)
            expected = (rows.square() * weights.unsqueeze(-2)).sum(-1)
            torch.testing.assert_close(response.variance(weights), expected)


def test_values_that_are_hardly_random_are_known() -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    known, random = (found("softmax", x, 0.2, v) for v in (None, torch.full_like(x, 1e-20)))
    assert ((known.mean - random.mean).abs() / known.variance.sqrt()).max() < 0.1
    (masks, _), (others, gains) = known.linear(), random.linear()
    assert gains is not None
    assert (responses(masks, x) - responses(others, x)).norm() < 0.05 * responses(masks, x).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", BOUNDS)
def test_extremes(kind: str, dtype: torch.dtype) -> None:
    norm = "norm" in kind
    for scale, p, n in itertools.product((0.0, 1e-6, 1.0, 1e3), (1e-6, 0.5, 1 - 1e-6), (6, 40)):
        x = torch.randn(10, n, dtype=dtype) * (min(scale, 1.0) * (1 - p) if norm else scale)
        x[:2] = 0.0
        x[2:4, 0] = scale * 100 if not norm else 1 - p
        x.requires_grad_()
        for variance in (None, torch.rand(10, n, dtype=dtype) * scale**2):
            if variance is not None and kind != "softmax":
                continue
            mine = found(kind, x, p, variance)
            rows = [r.along(torch.ones(2, 10, n, dtype=dtype)) for r in mine.linear() if r is not None]
            assert all(t.isfinite().all() for t in (mine.mean, mine.variance, *rows)), (scale, p, n)
            assert (mine.variance >= 0).all()
            (gradient,) = torch.autograd.grad(mine.mean.sum() + mine.variance.sum(), x)
            assert gradient.isfinite().all(), (scale, p, n)


@pytest.mark.parametrize("kind", BOUNDS)
def test_single_precision_is_near_double(kind: str) -> None:
    x = torch.randn(20, 32, dtype=torch.float64)
    for variance in (None, torch.rand_like(x)) if kind == "softmax" else (None,):
        high = found(kind, x, 0.2, variance)
        low = found(kind, x.float(), 0.2, None if variance is None else variance.float())
        torch.testing.assert_close(low.mean.double(), high.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(low.variance.double(), high.variance, rtol=1e-3, atol=1e-6)
        for one, other in zip(low.linear(), high.linear(), strict=True):
            if one is not None and other is not None:
                given = one.along(torch.ones(1, 20, 32)).double()
                expected = other.along(torch.ones(1, 20, 32, dtype=torch.float64))
                torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-3)
