"""Every rewrite is exact, whatever dropout drops; and it happens where it should, and only there."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import momentprop as mp
from momentprop.capture.trace import DROPOUTS, Trace, place_of, trace
from momentprop.network import inside
from momentprop.passes.rewrite import rewrite
from networks import BATCH, Apply, Shape, networks
from small import cnn

aten = torch.ops.aten
RELU, NORM = aten.relu.default, aten.batch_norm.default
POOLS = (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
CONVOLUTIONS = {
    getattr(getattr(aten, f"conv{n}d"), overload) for n in (1, 2, 3) for overload in ("default", "padding")
}
RESHAPES = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int)
SCALAR = {
    getattr(getattr(aten, name), overload)
    for name in ("add", "sub", "mul", "div", "rsub")
    for overload in ("Tensor", "Scalar")
} | {aten.neg.default}


def operators(made: Trace) -> list[Any]:
    """The operators of the graph, in order."""
    return [node.target for node in made.graph.nodes if node.op == "call_function"]


def count(made: Trace, kinds: Any) -> int:
    return sum(op in kinds for op in operators(made))


def run(made: Trace, model: nn.Module, inputs: tuple[Any, ...], masked: bool) -> list[Any]:
    """The graph as a plain function: dropouts do nothing, or multiply by a mask that their name fixes."""
    graph = made.copy_graph()

    def mask(x: Tensor, seed: str, dims: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, seed)))
        shape = x.shape if dims is None else (*x.shape[:dims], *[1] * (x.dim() - dims))
        return x * torch.rand(shape, generator=generator, dtype=x.dtype).round()

    for node in list(graph.nodes):
        if node.target is aten.feature_dropout.default and masked:
            node.target, node.args = mask, (node.args[0], "channels", 2)
        elif node.target in DROPOUTS and masked:
            node.target, node.args = mask, (node.args[0], node.name)
        elif node.target in DROPOUTS:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    state = [
        made.constants[name] if name in made.constants else functools.reduce(getattr, name.split("."), model)
        for name in made.state
    ]
    with torch.no_grad():
        return fx.GraphModule(made.root, graph)(*state, *inputs)


def rewritten(model: nn.Module, *inputs: Any) -> tuple[Trace, Trace]:
    """The trace of a model in float64 before and after; the function is asserted to be the same."""
    model = model.double().eval()
    before = trace(model, inputs)
    text = str(before.graph)
    after = rewrite(before)
    assert str(before.graph) == text  # the trace given is left alone
    with torch.no_grad():
        plain = model(*inputs)
    (out, *_) = run(after, model, inputs, masked=False)
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        run(before, model, inputs, masked=True), run(after, model, inputs, masked=True), strict=True
    ):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    return before, after


def norm(cls: Any, channels: int, signs: str = "mixed", **options: Any) -> nn.Module:
    """Batch norm with random statistics and scales: all positive, all negative, zero, or of all kinds."""
    made = cls(channels, **options)
    nn.init.normal_(made.running_mean)
    nn.init.uniform_(made.running_var, 0.2, 2.0)
    if made.weight is not None:
        nn.init.normal_(made.bias)
        nn.init.uniform_(made.weight, 0.3, 1.5)
        with torch.no_grad():
            kinds = {"positive": [1.0], "negative": [-1.0], "zero": [0.0], "mixed": [1.0, -1.0, 0.0]}[signs]
            made.weight.mul_(torch.tensor(kinds * channels)[:channels])
    return made


def images(n: int, channels: int = 3, size: int = 7) -> Tensor:
    return torch.randn(2, channels, *[size] * n, dtype=torch.float64)


def norm_of(n: int) -> Any:
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[n - 1]


def pool_of(n: int) -> Any:
    return (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[n - 1]


class Block(nn.Sequential):
    """Layers after a dropout, so that noise reaches them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(nn.Dropout(0.3), *layers)


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
        before, after = rewritten(Block(Apply(function, "f"), nn.MaxPool2d(2)), images(2))
        assert operators(after) == operators(before)

    @pytest.mark.parametrize("threshold", [0.0, 1.0])
    def test_softplus_with_a_low_threshold_is_not_increasing(self, threshold: float) -> None:
        """It jumps down to the identity at the threshold."""
        model = Block(nn.Softplus(threshold=threshold), nn.MaxPool2d(2))
        before, after = rewritten(model, images(2))
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
        assert operators(after)[1:] == [POOLS[1], POOLS[1], RELU]

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
        after = rewrite(before)
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


class TestActivateBeforeDropout:
    @pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.PReLU(3)], ids=str)
    @pytest.mark.parametrize("dropout", [nn.Dropout, nn.Dropout1d])
    def test_dropout_waits(self, activation: nn.Module, dropout: Any) -> None:
        model = nn.Sequential(dropout(0.4), activation).double()
        x = torch.randn(4, 3, 5, dtype=torch.float64)
        made = trace(model, x)
        rewritten = rewrite(made)
        assert operators(rewritten)[-1] in DROPOUTS
        for masked in (False, True):
            before, after = (run(m, model, (x,), masked)[0] for m in (made, rewritten))
            torch.testing.assert_close(after, before)
        out = mp.convert(model, x, fidelity="fast")(x)
        with torch.no_grad():
            torch.testing.assert_close(out.mean, activation(x))
            torch.testing.assert_close(out.variance, activation(x) ** 2 * 0.4 / 0.6)

    def test_only_where_it_may(self) -> None:
        class Both(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                y = F.dropout(x, 0.4, True)
                return y.relu() + y

        for model in (
            Both(),
            nn.Sequential(nn.Dropout(0.4), nn.ELU()),
            nn.Sequential(nn.AlphaDropout(0.4), nn.ReLU()),
        ):
            made = trace(model, torch.randn(2, 3))
            assert operators(rewrite(made)) == operators(made)


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
        model = Block(nn.Conv2d(3, 4, 3), norm(nn.BatchNorm2d, 4)).double().eval()
        x = images(2)
        bnn = mp.convert(model, x, fidelity="fast")
        with torch.no_grad():
            for tensor in (model[1].weight, model[1].bias, *model[2].parameters(), model[2].running_var):
                tensor.mul_(1.5)
            torch.testing.assert_close(bnn(x).mean, model(x))


class TestMergeReshapes:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.view(-1, 12).view(x.shape[0], 3, 4),
            lambda x: x.reshape(x.shape[0], 6, 2).reshape(x.shape[0], -1),
            lambda x: x.flatten(1).view(x.shape[0], 4, 3),
            lambda x: x.unsqueeze(1).contiguous().view(x.shape[0], 12),
            lambda x: x.unsqueeze(-1).squeeze(-1).reshape(x.shape[0], 2, 6),
            lambda x: x.unflatten(1, (3, 1)).squeeze(2).clone().view(x.shape[0], 12),
            lambda x: x.unsqueeze(1).squeeze().reshape(x.shape[0], 2, 6),
            lambda x: x.unsqueeze(1).unsqueeze(3).squeeze((1, 3)).view(x.shape[0], 12),
        ],
        ids=range(8),
    )
    def test_the_last_one_counts(self, function: Callable[[Tensor], Tensor]) -> None:
        before, after = rewritten(Block(Apply(function, "reshapes")), torch.randn(2, 3, 4).double())
        same_order = (*RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
        same_order += (aten.squeeze.default, aten.contiguous.default, aten.clone.default)
        assert count(before, same_order) > 1
        assert count(after, same_order) == 1

    def test_not_across_a_transposition(self) -> None:
        model = Block(Apply(lambda x: x.flatten(2).transpose(1, 2).reshape(x.shape[0], -1), "f"))
        before, after = rewritten(model, torch.randn(2, 3, 2, 2).double())
        assert Counter(operators(after)) == Counter(operators(before))

    def test_what_is_used_elsewhere_stays(self) -> None:
        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                y = F.dropout(x, 0.5, self.training).reshape(x.shape[0], 6, 2)
                return y.reshape(x.shape[0], 12) + y.sum((1, 2))[:, None]

        before, after = rewritten(Model(), torch.randn(2, 3, 4).double())
        assert count(after, RESHAPES) == count(before, RESHAPES) == 2

    def test_of_a_value_that_is_not_contiguous(self) -> None:
        """A view may become a reshape of something it could not view."""
        function = lambda x: x.transpose(1, 2).contiguous().view(x.shape[0], 12)  # noqa: E731
        before, after = rewritten(Block(Apply(function, "f")), torch.randn(2, 3, 4).double())
        assert count(before, {aten.contiguous.default}) == 1
        assert count(after, {aten.contiguous.default}) == 0


class TestFoldScalarChains:
    @pytest.mark.parametrize(
        ("function", "left"),
        [
            (lambda x: (x * 2 + 1) * 3, 2),
            (lambda x: x * 2 * 3, 1),
            (lambda x: x + 2 + 3, 1),
            (lambda x: x - 2 + 2 - 0.5, 1),
            (lambda x: torch.neg(-x), 0),
            (lambda x: -(1 - x), 1),
            (lambda x: 1 - (2 - x / 4), 2),
            (lambda x: (x / 4 - 1) / 0.5, 2),
            (lambda x: torch.add(x * 2, 3, alpha=4) - 1, 2),
            (lambda x: torch.sub(x, 3, alpha=-2) * 1.5, 2),
            (lambda x: torch.rsub(x + 1, 3, alpha=2), 2),
            (lambda x: torch.rsub(torch.rsub(x, 3, alpha=2), 1, alpha=0.5), 1),
            (lambda x: x * 0 + 3, 2),
            (lambda x: (x * 2 / 2) + 0, 0),
        ],
        ids=range(14),
    )
    def test_chains(self, function: Callable[[Tensor], Tensor], left: int) -> None:
        before, after = rewritten(Block(Apply(function, "chain")), torch.randn(2, 3).double())
        assert count(before, SCALAR) >= count(after, SCALAR) == left

    def test_a_single_operator_stays(self) -> None:
        before, after = rewritten(Block(Apply(lambda x: x * 2, "f")), torch.randn(2, 3).double())
        assert operators(after) == operators(before)

    def test_intermediate_values_that_are_used_elsewhere_stay(self) -> None:
        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                first = F.dropout(x, 0.5, self.training) * 2 + 1
                second = (first - 3) * 4 / 5
                return second.cos() * first

        before, after = rewritten(Model(), torch.randn(2, 3).double())
        assert count(before, SCALAR) == 6  # with the product at the end
        assert count(after, SCALAR) == 5

    def test_chain_that_is_an_output_too(self) -> None:
        class Model(nn.Module):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                first = F.dropout(x, 0.5, self.training) * 2 * 3
                return first, first + 1 + 2

        model, x = Model().double().eval(), torch.randn(2, 3).double()
        before = trace(model, x)
        after = rewrite(before)
        for one, other in zip(run(before, model, (x,), True), run(after, model, (x,), True), strict=True):
            torch.testing.assert_close(other, one)

    def test_products_with_tensors_end_a_chain(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("scale", torch.randn(3))

            def forward(self, x: Tensor) -> Tensor:
                return ((F.dropout(x, 0.5, self.training) * 2 * 3) * self.scale) * 4 * 5

        before, after = rewritten(Model(), torch.randn(2, 3).double())
        assert (count(before, SCALAR), count(after, SCALAR)) == (5, 3)

    def test_integers_are_left_alone(self) -> None:
        """Their division truncates, their products overflow: they do not compose."""

        class Model(nn.Module):
            def forward(self, x: Tensor, n: Tensor) -> Tensor:
                index = (n * 3 + 1) * 2 - 5
                return F.dropout(x, 0.5, self.training) * (index / 4 * 0.5)

        x, n = torch.randn(2, 3).double(), torch.randint(5, (2, 3))
        before, after = rewritten(Model(), x, n)
        assert count(before, {aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor}) == 7
        integer = [
            node for node in after.graph.nodes if node.target in SCALAR and not node.meta["val"].is_complex()
        ]
        assert sum(not node.meta["val"].is_floating_point() for node in integer) == 4

    def test_casts_between_floating_types_are_kept(self) -> None:
        """Rounding to float32 in the middle is part of the function."""
        model = Block(Apply(lambda x: ((x * 3 + 1).float() * 5 + 2).double() / 3 * 7, "casts"))
        before, after = rewritten(model, torch.randn(2, 3).double())
        dtypes = [node.meta["val"].dtype for node in after.graph.nodes if node.target in SCALAR]
        assert torch.float32 in dtypes
        assert count(after, SCALAR) < count(before, SCALAR)


def test_no_rewrites_in_tier_paper() -> None:
    """Its rules are the paper's, on the network as it was written."""
    x = torch.randn(2, 3, 8, 8)
    model = cnn().eval()
    graphs = {t: inside(mp.convert(model, x, fidelity=t)).graph for t in ("paper", "fast", "accurate")}
    assert count(graphs["paper"], {NORM}) == 1
    assert count(graphs["fast"], {NORM}) == count(graphs["accurate"], {NORM}) == 0


@st.composite
def chains(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[nn.Sequential, Tensor]:
    """Layers that rewrites look for, in any order."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    n = draw(st.integers(1, 3))
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1]
    padding = st.sampled_from([0, 1])
    kinds: dict[str, Callable[[], nn.Module]] = {
        "convolution": lambda: convolution(3, 3, 3, padding=1, groups=draw(st.sampled_from([1, 3]))),
        "norm": lambda: norm(norm_of(n), 3, draw(st.sampled_from(["mixed", "negative"]))),
        "relu": lambda: nn.ReLU(inplace=draw(st.booleans())),
        "tanh": nn.Tanh,
        "pool": lambda: pool_of(n)(3, stride=draw(padding) + 1, padding=1, ceil_mode=draw(st.booleans())),
        "affine": lambda: Apply(lambda x: 2 - x / 3, "affine"),
        "flatten": lambda: Apply(lambda x: x.flatten(1).reshape(x.shape), "flatten"),
        "dropout": lambda: nn.Dropout(0.5),
    }
    names = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=2, max_size=7))
    return Block(*[kinds[name]() for name in names]), images(n, size=6 - n)


@settings(deadline=None, max_examples=settings.default.max_examples // 2)
@given(chains())
def test_chains_of_layers_are_rewritten_throughout(chain: tuple[nn.Sequential, Tensor]) -> None:
    """The same function; and nothing is left that a rewrite is for."""
    _, after = rewritten(*chain)
    for node in after.graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None or len(source.users) > 1:
            continue
        assert not (node.target in POOLS and source.target in (RELU, NORM, aten.tanh.default))
        assert not (node.target is NORM and source.target in CONVOLUTIONS)
        assert not (node.target in RESHAPES[:2] and source.target in RESHAPES)


# torch says so once per process, for the plain network too
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@settings(deadline=None, max_examples=settings.default.max_examples, suppress_health_check=list(HealthCheck))
@given(networks())
def test_random_networks_stay_the_same_function(network: tuple[nn.Sequential, Shape]) -> None:
    """For idle dropouts, and for masks drawn at random."""
    model, shape = network
    rewritten(model, torch.randn(BATCH, *shape, dtype=torch.float64))
