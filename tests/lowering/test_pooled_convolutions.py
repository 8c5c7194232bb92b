"""Factors per channel and averages over windows as parts of convolutions: same numbers, less to compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import momentprop as mp
from momentprop.lowering.pooled_convolutions import join_convolutions

aten = torch.ops.aten
AVERAGES = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)


def traced(model: nn.Module, x: Tensor) -> fx.GraphModule:
    module: fx.GraphModule = torch.export.export(model.eval(), (x,)).module(check_guards=False)
    return module


def joined(model: nn.Module, x: Tensor) -> list[Any]:
    """Operators of the graph behind the pass, whose numbers are those before it."""
    module = traced(model, x)
    expected = module(x)
    join_convolutions(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(x), expected)
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


class Factor(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


JOINED = {
    "rows": (nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d((1, 2)), (8, 6)),
    "windows": (nn.Conv2d(2, 3, (3, 5), padding=(0, 2)), nn.AvgPool2d(2), (9, 7)),
    "three": (nn.Conv2d(2, 3, 3), nn.AvgPool2d((1, 3)), (5, 12)),
    "no bias": (nn.Conv2d(2, 3, 3, bias=False), nn.AvgPool2d((2, 1)), (6, 6)),
    "same": (nn.Conv2d(2, 3, 3, padding="same"), nn.AvgPool2d((1, 2)), (6, 6)),
    "strides": (nn.Conv2d(2, 3, 4, stride=2, padding=1), nn.AvgPool2d((1, 2)), (12, 13)),
    "strides that are dilations": (nn.Conv1d(2, 3, 3, stride=2, dilation=2), nn.AvgPool1d(2), (21,)),
    "dilated elsewhere": (nn.Conv2d(2, 3, 3, dilation=(2, 1)), nn.AvgPool2d((1, 2)), (8, 8)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), nn.AvgPool2d((1, 2)), (6, 6)),
    "one dimension": (nn.Conv1d(2, 3, 3), nn.AvgPool1d(2), (9,)),
    "three dimensions": (nn.Conv3d(2, 3, 3), nn.AvgPool3d((1, 1, 2)), (5, 5, 7)),
}


@pytest.mark.parametrize("case", JOINED)
def test_averages_are_convolutions(case: str) -> None:
    convolution, pool, sizes = JOINED[case]
    operators = joined(nn.Sequential(convolution, pool), torch.randn(2, convolution.in_channels, *sizes))
    assert not set(operators) & set(AVERAGES)


APART = {
    "overlapping": (nn.Conv2d(2, 3, 3), nn.AvgPool2d(3, 2), (8, 8)),
    "over the border": (nn.Conv2d(2, 3, 3), nn.AvgPool2d(2, padding=1), (8, 8)),
    "half windows": (nn.Conv2d(2, 3, 3), nn.AvgPool2d(2, ceil_mode=True), (9, 9)),
    "another divisor": (nn.Conv2d(2, 3, 3), nn.AvgPool2d(2, divisor_override=3), (8, 8)),
    "dilated": (nn.Conv2d(2, 3, 3, dilation=2), nn.AvgPool2d((1, 2)), (8, 8)),
    "large windows": (nn.Conv2d(2, 3, 3), nn.AvgPool2d(6), (8, 8)),
    "padded on one side": (nn.Conv2d(2, 3, 4, padding="same"), nn.AvgPool2d((1, 2)), (8, 8)),
}


@pytest.mark.parametrize("case", APART)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_what_is_no_such_average_stays(case: str) -> None:
    convolution, pool, sizes = APART[case]
    assert aten.avg_pool2d.default in joined(nn.Sequential(convolution, pool), torch.randn(2, 2, *sizes))


def test_a_convolution_that_others_read_stays() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.conv(x)
            return nn.functional.avg_pool2d(y, 2), y * torch.ones(3, 1, 1)

    operators = joined(Both(), torch.randn(2, 2, 6, 6))
    assert aten.avg_pool2d.default in operators
    assert operators.count(aten.conv2d.default) == 1


@pytest.mark.parametrize("shape", [(), (3, 1, 1), (1, 3, 1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_factors_per_channel_belong_to_the_weights(shape: tuple[int, ...], bias: bool) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=bias), Factor(*shape), nn.AvgPool2d((1, 2)))
    operators = joined(model, torch.randn(2, 2, 6, 6))
    assert operators.index(aten.conv2d.default) == len(operators) - 1  # the last one


@pytest.mark.parametrize("shape", [(4,), (4, 1), (3, 4, 1), (2, 1, 1, 1)], ids=str)
def test_other_factors_stay(shape: tuple[int, ...]) -> None:
    operators = joined(nn.Sequential(nn.Conv2d(2, 3, 3), Factor(*shape)), torch.randn(2, 2, 6, 6))
    assert operators == [aten.conv2d.default, aten.mul.Tensor]


def test_a_square_is_no_factor() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    operators = joined(nn.Sequential(nn.Conv2d(2, 3, 3), Square()), torch.randn(1, 2, 3, 3))
    assert operators == [aten.conv2d.default, aten.mul.Tensor]


@pytest.mark.parametrize("tier", ["paper", "fast", "accurate"])
def test_frozen_networks_have_them(tier: str) -> None:
    """Batch norm with factors of both signs, before pooling: no factor is left behind a convolution."""
    norm = nn.BatchNorm2d(4)
    nn.init.uniform_(norm.weight, -1, 1)
    block = [nn.Dropout(0.3), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), norm, nn.MaxPool2d(2)]
    model = nn.Sequential(*block, nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 3)).double().eval()
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    bnn = mp.convert(model, x, tier)
    frozen = bnn.freeze()
    for part in ("mean", "variance"):
        torch.testing.assert_close(getattr(frozen(x), part), getattr(bnn(x), part))
    convolutions = (aten.conv2d.default, aten.conv2d.padding)
    targets = {node.target for node in frozen.program.graph.nodes}
    assert not targets & {aten._assert_tensor_metadata.default, aten.sign.default}  # of weights alone
    read = [user for node in frozen.program.graph.nodes if node.target in convolutions for user in node.users]
    assert read
    if tier == "fast":
        assert not {node.target for node in read} & {aten.mul.Tensor, *AVERAGES}
