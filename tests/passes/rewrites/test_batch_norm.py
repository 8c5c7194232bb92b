"""Batch norm is folded into the layer before it, where that has its channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from passed import CONVOLUTIONS, NORM, POOLS, RELU, Block, count, images, norm, norm_of, operators, rewritten

aten = torch.ops.aten


class TestFoldBatchNorm:
    @pytest.mark.parametrize("signs", ["positive", "mixed"])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("affine", [True, False])
    def test_after_linear(self, bias: bool, affine: bool, signs: str) -> None:
        model = Block(nn.Linear(4, 3, bias=bias), norm(nn.BatchNorm1d, 3, signs, affine=affine))
        before, after = rewritten(model, torch.randn(5, 4, dtype=torch.float64))
        assert count(before, {NORM}) == 1
        assert count(after, {NORM}) == 0
        assert count(after, {aten.linear.default}) == 1

    @pytest.mark.parametrize("n", [1, 2, 3])
    @pytest.mark.parametrize(
        "options",
        [
            {"kernel_size": 3},
            {"kernel_size": 3, "bias": False},
            {"kernel_size": 3, "groups": 2, "stride": 2},
            {"kernel_size": 3, "groups": 4, "bias": False, "dilation": 2},
            {"kernel_size": 3, "padding": "same"},
            {"kernel_size": 3, "padding": "valid", "groups": 2, "bias": False},
            {"kernel_size": 1, "padding": 1},
            {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("affine", [True, False])
    def test_after_convolution(self, n: int, options: dict[str, Any], affine: bool) -> None:
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1](4, 8, **options)
        model = Block(convolution, norm(norm_of(n), 8, affine=affine, eps=1e-2))
        before, after = rewritten(model, images(n, channels=4))
        assert count(before, {NORM}) == 1
        assert count(after, {NORM}) == 0
        assert count(after, CONVOLUTIONS) == 1

    def test_then_the_pool_moves_before_the_activation(self) -> None:
        model = Block(nn.Conv2d(3, 4, 3), norm(nn.BatchNorm2d, 4), nn.ReLU(), nn.MaxPool2d(2))
        _, after = rewritten(model, images(2))
        kinds = [op for op in operators(after) if op in (NORM, RELU, *POOLS, *CONVOLUTIONS)]
        assert kinds == [aten.conv2d.default, POOLS[1], RELU]
        assert not count(after, {aten.sign.default})

    def test_not_where_the_convolution_is_used_elsewhere(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.norm = nn.Conv2d(3, 3, 3), norm(nn.BatchNorm2d, 3)

            def forward(self, x: Tensor) -> Tensor:
                y = self.conv(F.dropout(x, 0.5, self.training))
                return self.norm(y) - y

        before, after = rewritten(Model(), images(2))
        assert operators(after) == operators(before)

    def test_not_after_a_linear_layer_whose_features_are_not_the_channels(self) -> None:
        """Batch norm of [batch, time, features] normalises by time step."""
        model = Block(nn.Linear(4, 3), norm(nn.BatchNorm1d, 3))
        before, after = rewritten(model, torch.randn(2, 3, 4, dtype=torch.float64))
        assert operators(after) == operators(before)

    def test_not_after_a_convolution_of_one_image(self) -> None:
        """[channels, length] are samples and channels to batch norm."""
        model = Block(nn.Conv1d(2, 3, 3, padding=1), norm(nn.BatchNorm1d, 5))
        before, after = rewritten(model, torch.randn(2, 5, dtype=torch.float64))
        assert operators(after) == operators(before)

    def test_not_with_the_statistics_of_the_batch(self) -> None:
        model = Block(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
        before, after = rewritten(model, images(2))
        assert operators(after) == operators(before)

    def test_not_behind_a_dropout(self) -> None:
        """Dropped values take part in the norm's shift."""
        model = Block(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), norm(nn.BatchNorm2d, 4))
        before, after = rewritten(model, images(2))
        assert operators(after) == operators(before)

    def test_one_layer_used_twice_with_two_norms(self) -> None:
        """Each use gets weights of its own."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(3, 3)
                self.first, self.second = norm(nn.BatchNorm1d, 3), norm(nn.BatchNorm1d, 3)

            def forward(self, x: Tensor) -> Tensor:
                x = F.dropout(x, 0.5, self.training)
                return self.second(self.linear(torch.relu(self.first(self.linear(x)))))

        _, after = rewritten(Model(), torch.randn(4, 3, dtype=torch.float64))
        assert count(after, {NORM}) == 0

    def test_weights_that_change_later_are_seen(self) -> None:
        """What is folded is computed from the parameters at every call."""
        layers = nn.Dropout(0.3), nn.Conv2d(3, 4, 3), norm(nn.BatchNorm2d, 4)
        model = nn.Sequential(*layers).double().eval()
        x = images(2)
        bnn = mp.convert(model, x, fidelity="fast")
        with torch.no_grad():
            for tensor in (model[1].weight, model[1].bias, *model[2].parameters(), model[2].running_var):
                tensor.mul_(1.5)
            torch.testing.assert_close(bnn(x).mean, model(x))
