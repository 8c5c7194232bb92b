"""Every kind of dropout, as models write them: converted and compared with sampling."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp


class Apply(nn.Module):
    """A function of (training, x) as a layer."""

    def __init__(self, function: Callable[[bool, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.training, x)


class Residual(nn.Module):
    def __init__(self, drop: Callable[[bool, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.drop = Apply(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.inner(x))


def drop_path(training: bool, x: Tensor) -> Tensor:
    """As in timm: a Bernoulli variable per sample."""
    if not training:
        return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    return x * x.new_empty(shape).bernoulli_(0.8).div_(0.8)


def drop_path_by_floor(training: bool, x: Tensor) -> Tensor:
    """As in many a repository."""
    if not training:
        return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    mask = 0.8 + torch.rand(shape, dtype=x.dtype, device=x.device)
    return x.div(0.8) * mask.floor_()


def gaussian(training: bool, x: Tensor) -> Tensor:
    return x * (1 + 0.4 * torch.randn_like(x)) if training else x


def added(training: bool, x: Tensor) -> Tensor:
    return x + 0.3 * torch.randn(x.shape) if training else x


def locked(training: bool, x: Tensor) -> Tensor:
    """One mask for all positions of a sequence, as in language models."""
    return x * x.new_empty(x.shape[0], 1, x.shape[2]).bernoulli_(0.7) / 0.7 if training else x


def by_sample(training: bool, x: Tensor) -> Tensor:
    """MONAI's VNet in two dimensions: whole samples are dropped."""
    return F.dropout3d(x.unsqueeze(0), 0.3, training).squeeze(0)


def dense(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 3))


def images(n: int, *layers: nn.Module) -> nn.Module:
    """Enough channels that losing one is no big jump."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1]
    return nn.Sequential(
        conv(2, 32, 2), nn.ReLU(), *layers, conv(32, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 3**n, 2)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "in place": (lambda: dense(nn.Dropout(0.3, inplace=True), nn.ReLU(inplace=True)), (8,)),
    "alpha": (lambda: dense(nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(32, 32), nn.SELU()), (8,)),
    "channels 1d": (lambda: images(1, nn.Dropout1d(0.2)), (2, 5)),
    "channels 2d": (lambda: images(2, nn.Dropout2d(0.2, inplace=True)), (2, 5, 5)),
    "channels 3d": (lambda: images(3, nn.Dropout3d(0.2)), (2, 5, 5, 5)),
    "alpha channels": (lambda: images(2, nn.FeatureAlphaDropout(0.2)), (2, 5, 5)),
    "drop path": (lambda: dense(*[Residual(drop_path, 32) for _ in range(3)]), (8,)),
    "drop path by floor": (lambda: dense(*[Residual(drop_path_by_floor, 32) for _ in range(3)]), (8,)),
    "gaussian": (lambda: dense(Apply(gaussian), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()), (8,)),
    "added noise": (lambda: dense(Apply(added), nn.ReLU()), (8,)),
    "locked": (lambda: nn.Sequential(Apply(locked), nn.Flatten(), nn.Linear(24, 2)), (3, 8)),
    "whole samples": (lambda: nn.Sequential(Apply(by_sample), nn.Flatten(), nn.Linear(18, 2)), (2, 3, 3)),
    "encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), nn.Flatten(), nn.Linear(48, 2)
        ),
        (3, 16),
    ),
    "encoder, norm first": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", batch_first=True, norm_first=True),
            nn.Flatten(),
            nn.Linear(48, 2),
        ),
        (3, 16),
    ),
}


@pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)
def test_agrees_with_sampling(make: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(3, *shape)
    network = mp.convert(model, x, "accurate", dropout=nn.Module)
    out, mc = network(x), mp.monte_carlo(network, x, n_samples=3000)
    ratio = out.std / mc.std
    assert 0.93 < ratio.median() < 1.07
    assert ratio.min() > 0.8
    assert ratio.max() < 1.2
    assert ((out.mean - mc.mean).abs() / mc.std).max() < 0.2


@pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)
def test_diagonal_tiers_convert(make: Any, shape: tuple[int, ...]) -> None:
    model, x = make().eval(), torch.randn(3, *shape)
    for fidelity in ("paper", "fast"):
        out = mp.convert(model, x, fidelity, dropout=nn.Module)(x)
        assert out.variance.isfinite().all()
        assert (out.variance >= 0).all()
        assert out.variance.max() > 0


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Dropout1d(0.3), (3, 4)), (nn.Dropout2d(0.3), (3, 2, 2)), (nn.Dropout3d(0.3), (2, 2, 2, 2))],
    ids=["1d", "2d", "3d"],
)
def test_channel_dropout_without_a_batch(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """[channels, ...]: the first dimension is that of masks, and every sum over the others shares one."""
    x = torch.randn(*shape)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of inputs that may lack their batch
        out = mp.convert(Model(), x, fidelity="fast")(x)
    torch.testing.assert_close(out.mean, x)
    torch.testing.assert_close(out.variance, x**2 * 0.3 / 0.7)


@pytest.mark.parametrize("layer", [nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout2d])
def test_everything_dropped_is_an_error(layer: Any) -> None:
    with pytest.raises(mp.MomentpropError, match="p = 1"):
        mp.convert(nn.Sequential(layer(1.0)), torch.randn(2, 3, 4, 4))
    with pytest.raises(mp.NoDropoutError):
        mp.convert(nn.Sequential(layer(0.0)), torch.randn(2, 3, 4, 4))
