"""Max pooling moves in front of monotone functions, and only of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentprop.capture.trace import Trace, trace
from momentprop.graph.place import place_of
from momentprop.passes.rewrites.pool_before_activation import POOL_BEFORE_ACTIVATION
from networks import Apply
from passed import (
    NORM,
    POOLS,
    RELU,
    Block,
    count,
    images,
    norm,
    norm_of,
    operators,
    passed,
    pool_of,
    rewritten,
)

aten = torch.ops.aten


class TestPoolBeforeActivation:
    def assert_pools_first(self, before: Trace, after: Trace, *functions: Any) -> None:
        """The pool stood behind the functions, and stands before all of them, which keep their order."""
        assert [op for op in operators(before) if op in (*POOLS, *functions)][-1] in POOLS
        order = [op for op in operators(after) if op in (*POOLS, *functions)]
        assert order[0] in POOLS
        assert tuple(order[1:]) == functions

    @pytest.mark.parametrize("n", [1, 2, 3])
    @pytest.mark.parametrize(
        "options",
        [
            {"kernel_size": 2},
            {"kernel_size": 3, "stride": 2, "padding": 1},
            {"kernel_size": 3, "stride": 1},
            {"kernel_size": 2, "stride": 2, "ceil_mode": True},
            {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2, "ceil_mode": True},
        ],
        ids=str,
    )
    def test_settings_of_the_pool(self, n: int, options: dict[str, Any]) -> None:
        model = Block(norm(norm_of(n), 3), nn.ReLU(), pool_of(n)(**options))
        self.assert_pools_first(*rewritten(model, images(n)), NORM, RELU)

    @pytest.mark.parametrize(
        ("activation", "op"),
        [
            (nn.ReLU(), RELU),
            (nn.ReLU6(), aten.hardtanh.default),
            (nn.Hardtanh(-0.5, 0.7), aten.hardtanh.default),
            (nn.Hardsigmoid(), aten.hardsigmoid.default),
            (nn.Sigmoid(), aten.sigmoid.default),
            (nn.Tanh(), aten.tanh.default),
            (nn.SELU(), aten.selu.default),
            (Apply(torch.exp, "exp"), aten.exp.default),
        ],
        ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
    )
    def test_every_monotone_activation(self, activation: nn.Module, op: Any) -> None:
        before, after = rewritten(Block(activation, nn.MaxPool2d(2)), images(2))
        assert op in operators(before)
        self.assert_pools_first(before, after, op)

    @pytest.mark.parametrize("padding", [0, 1])
    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_dropout_of_channels(self, n: int, padding: int) -> None:
        drop = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)[n - 1](0.5)
        model = Block(nn.ReLU(), drop, pool_of(n)(3, 2, padding))
        self.assert_pools_first(*rewritten(model, images(n)), RELU, aten.feature_dropout.default)

    @pytest.mark.parametrize(
        "function",
        [torch.cos, torch.abs, torch.square, F.gelu, F.silu, F.mish, F.hardswish, torch.neg],
        ids=lambda f: f.__name__,
    )
    def test_not_where_the_function_is_not_increasing(self, function: Callable[[Tensor], Tensor]) -> None:
        model = Block(Apply(function, "f"), nn.MaxPool2d(2))
        before, after = rewritten(model, images(2), passes=(POOL_BEFORE_ACTIVATION,))
        assert operators(after) == operators(before)

    @pytest.mark.parametrize("threshold", [0.0, 1.0])
    def test_softplus_with_a_low_threshold_is_not_increasing(self, threshold: float) -> None:
        """It jumps down to the identity at the threshold."""
        model = Block(nn.Softplus(threshold=threshold), nn.MaxPool2d(2))
        before, after = rewritten(model, images(2), passes=(POOL_BEFORE_ACTIVATION,))
        assert operators(after) == operators(before)

    @pytest.mark.parametrize("signs", ["positive", "negative", "zero", "mixed"])
    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_batch_norm_of_any_sign(self, n: int, signs: str) -> None:
        model = Block(norm(norm_of(n), 3, signs), pool_of(n)(2))
        self.assert_pools_first(*rewritten(model, images(n)), NORM)

    @pytest.mark.parametrize("padding", [0, 1])
    def test_chain_of_two_norms_and_activations(self, padding: int) -> None:
        """Signs multiply: all four combinations of the two norms' are among the channels."""
        first, second = norm(nn.BatchNorm2d, 4, "positive"), norm(nn.BatchNorm2d, 4, "positive")
        with torch.no_grad():
            first.weight.mul_(torch.tensor([1, 1, -1, -1]))
            second.weight.mul_(torch.tensor([1, -1, 1, -1]))
        model = Block(nn.ReLU(), first, nn.Tanh(), second, nn.ReLU(), nn.MaxPool2d(3, 2, padding))
        pair = rewritten(model, images(2, 4))
        self.assert_pools_first(*pair, RELU, NORM, aten.tanh.default, NORM, RELU)

    def test_norm_without_scale_needs_no_sign(self) -> None:
        model = Block(norm(nn.BatchNorm2d, 3, affine=False), nn.ReLU(), nn.MaxPool2d(2))
        before, after = rewritten(model, images(2))
        self.assert_pools_first(before, after, NORM, RELU)
        assert not count(after, {aten.sign.default, aten.mul.Tensor})

    def test_pool_after_pool(self) -> None:
        """Both move: the activation works on the fewest elements."""
        model = Block(nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(2))
        _, after = rewritten(model, images(2, size=8))
        assert operators(after)[2:] == [POOLS[1], POOLS[1], RELU]

    def test_every_block_of_a_network(self) -> None:
        layers = [nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        _, after = rewritten(Block(*layers, *layers), images(2, size=8))
        kinds = [op for op in operators(after) if op in (RELU, *POOLS)]
        assert kinds == [POOLS[1], RELU] * 2

    @pytest.mark.parametrize("used", ["before the pool", "as an output"])
    def test_not_where_the_activation_is_used_elsewhere(self, used: str) -> None:
        class Model(nn.Module):
            def forward(self, x: Tensor) -> Any:
                y = torch.tanh(F.dropout(x, 0.5, self.training))
                pooled = F.max_pool2d(y, 2)
                return (y, pooled) if used == "as an output" else pooled + y.mean((2, 3), keepdim=True)

        model, x = Model().double().eval(), images(2)
        before = trace(model, x)
        after = passed(before, (POOL_BEFORE_ACTIVATION,))
        assert operators(after) == operators(before)

    def test_up_to_the_first_value_that_is_used_elsewhere(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = norm(nn.BatchNorm2d, 3)

            def forward(self, x: Tensor) -> Tensor:
                y = self.norm(F.dropout(x, 0.5, self.training))
                return F.max_pool2d(torch.relu(y), 2) + y.mean((2, 3), keepdim=True)

        _, after = rewritten(Model(), images(2))
        kinds = [op for op in operators(after) if op in (NORM, RELU, *POOLS)]
        assert kinds == [NORM, POOLS[1], RELU]

    def test_norm_with_the_statistics_of_the_batch_stays(self) -> None:
        """Each value depends on the others there: no function of one value."""
        model = Block(nn.BatchNorm2d(3, track_running_stats=False), nn.MaxPool2d(2))
        before, after = rewritten(model, images(2))
        assert operators(after) == operators(before)

    @pytest.mark.parametrize("n", [1, 2])
    def test_pool_over_the_channels_of_a_norm(self, n: int) -> None:
        """A pool of n dimensions takes n + 1 for one image: then channels are among what it pools."""
        kernel = (3, 1)[:n]
        pool = functools.partial((F.max_pool1d, F.max_pool2d)[n - 1], kernel_size=kernel, stride=1)
        padded = functools.partial(pool, padding=(1, 0)[:n])  # as many windows as channels
        for function in (pool, padded):
            model = Block(norm(nn.BatchNorm1d, 4), Apply(function, "pool"))
            rewritten(model, torch.randn(2, 4, *[5] * (n - 1), dtype=torch.float64))

    def test_moved_functions_keep_their_places(self) -> None:
        """For messages: module path and source line."""
        before, after = rewritten(Block(nn.ReLU(), nn.MaxPool2d(2)), images(2))
        for made in (before, after):
            places = {node.target: place_of(node).module for node in made.graph.nodes}
            assert places[RELU] == "1"
            assert places[POOLS[1]] == "2"
