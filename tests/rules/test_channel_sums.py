"""Behind channel dropout elements fall together, and linear maps that follow know it.

Such a network is linear in its masks: with one channel of the input alone it gives that channel's share of
the output, and the variance is p/(1-p) times the sum of their squares. Exact, so no tolerance but rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.moments import Moments
from momentprop.rules.channel_sums import _by_channel, _by_offset, squares_of_channels

P = 0.3


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def norm() -> nn.Module:
    layer = nn.BatchNorm2d(4)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.running_mean)
    return layer


DROPOUTS = {1: nn.Dropout1d, 2: nn.Dropout2d, 3: nn.Dropout3d}
LINEAR = {
    "conv1d": ((4, 9), lambda: nn.Conv1d(4, 3, 3)),
    "conv1d strided": ((4, 9), lambda: nn.Conv1d(4, 3, 4, stride=2, padding=1)),
    "conv2d": ((4, 6, 7), lambda: nn.Conv2d(4, 3, 3, padding=1)),
    "conv2d of one": ((4, 6, 7), lambda: nn.Conv2d(4, 3, 1)),
    "conv2d strided": ((4, 6, 7), lambda: nn.Conv2d(4, 3, (3, 2), stride=(2, 1), padding=(0, 1))),
    "conv2d dilated": ((4, 7, 8), lambda: nn.Conv2d(4, 6, (3, 2), dilation=2, padding="same", groups=2)),
    "conv2d by channel": ((4, 6, 7), lambda: nn.Conv2d(4, 4, 3, groups=4)),
    "conv2d of many taps": ((4, 6, 7), lambda: nn.Conv2d(4, 6, (5, 4), stride=(1, 2), padding=2, groups=2)),
    "conv3d": ((2, 4, 3, 5), lambda: nn.Conv3d(2, 3, (2, 3, 2), padding=1)),
    "flattened": ((4, 3, 2), lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 5))),
    "viewed": ((4, 3, 2), lambda: nn.Sequential(Apply(lambda x: x.view(-1, 24)), nn.Linear(24, 5))),
    "average": ((4, 6, 7), lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)),
    "average of all": ((4, 6, 7), lambda: nn.AdaptiveAvgPool2d(1)),
    "average of some": ((4, 6, 7), lambda: nn.AdaptiveAvgPool2d((2, 3))),
    "average 1d": ((4, 6), lambda: nn.AvgPool1d(2)),
    "mean": ((4, 6, 7), lambda: Apply(lambda x: x.mean([2, 3]))),
    "sum": ((4, 6, 7), lambda: Apply(lambda x: x.sum(-1))),
    "mean over channels": ((4, 6, 7), lambda: Apply(lambda x: x.mean([2, 3]).sum(1))),
    "scaled, then conv2d": ((4, 6, 7), lambda: nn.Sequential(Apply(lambda x: 1 - 2 * x), nn.Conv2d(4, 3, 3))),
    "normalized, then conv2d": ((4, 6, 7), lambda: nn.Sequential(norm(), nn.Conv2d(4, 3, 3))),
    "averaged, then dense": (
        (4, 6, 7),
        lambda: nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 2)),
    ),
}


def exact_variance(layer: nn.Module, x: Tensor) -> Tensor:
    origin = layer(torch.zeros_like(x))
    total = torch.zeros_like(origin)
    for channel in range(x.shape[1]):
        alone = torch.zeros_like(x)
        alone[:, channel] = x[:, channel]
        total += (layer(alone) - origin).square()
    return total * P / (1 - P)


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
@pytest.mark.parametrize(("shape", "make"), LINEAR.values(), ids=LINEAR)
def test_variance_behind_a_linear_map_is_exact(shape, make, fidelity) -> None:
    torch.manual_seed(0)
    layer = make().double().eval()
    x = torch.randn(3, *shape, dtype=torch.float64)
    model = nn.Sequential(DROPOUTS[len(shape) - 1](P), layer).eval()
    out = mp.convert(model, x, fidelity=fidelity, **({"outputs": 3} if fidelity == "accurate" else {}))(x)
    with torch.no_grad():
        torch.testing.assert_close(out.mean, layer(x), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(out.variance, exact_variance(layer, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("groups", [1, 2, 18])
@pytest.mark.parametrize("kernel", [(1, 1), (2, 3), (3, 4)])
def test_both_ways_to_add_up_channels(groups: int, kernel: tuple[int, int]) -> None:
    d = torch.randn(2, 18, 7, 8, dtype=torch.float64)
    weight = torch.randn(36, 18 // groups, *kernel, dtype=torch.float64)
    given = (F.conv2d, d, weight, [2, 1], [1, 2], groups)
    expected = torch.zeros_like(F.conv2d(d, weight, None, (2, 1), 0, (1, 2), groups))
    for channel in range(18):
        alone = torch.zeros_like(d)
        alone[:, channel] = d[:, channel]
        expected += F.conv2d(alone, weight, None, (2, 1), 0, (1, 2), groups).square()
    for way in (_by_offset, _by_channel):
        torch.testing.assert_close(way(*given), expected)
    torch.testing.assert_close(squares_of_channels(*given[1:]), expected)


@pytest.mark.parametrize("op", [F.dropout2d, F.feature_alpha_dropout], ids=["inverted", "alpha"])
def test_uncertain_inputs_and_a_second_dropout(op) -> None:
    """Noise that elements do not share adds up as before: against sampling."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(F.dropout(op(x, 0.3, True), 0.2, True))

    torch.manual_seed(0)
    model = Model().double()
    x = Moments(torch.randn(1, 3, 4, 4, dtype=torch.float64), torch.rand(1, 3, 4, 4, dtype=torch.float64))
    out = mp.convert(model, x, fidelity="fast")(x)
    mc = mp.monte_carlo(model, x, n_samples=40_000)
    assert ((out.mean - mc.mean).abs() <= 5 * mc.mean_error).all()
    assert ((out.variance - mc.variance).abs() <= 5 * mc.variance_error).all()


def test_gradients_and_extremes_are_finite() -> None:
    model = nn.Sequential(nn.Dropout2d(0.5), nn.Conv2d(2, 2, 3))
    bnn = mp.convert(model, torch.zeros(1, 2, 4, 4), fidelity="fast")
    for scale in (0.0, 1e-20, 1.0, 1e6):
        x = (torch.randn(2, 2, 4, 4) * scale).requires_grad_()
        out = bnn(x)
        assert out.variance.isfinite().all()
        assert (out.variance >= 0).all()
        (gradient,) = torch.autograd.grad(out.variance.sum(), x)
        assert gradient.isfinite().all()
