"""Told covariance between elements a small offset apart, against the exact one of the whole tensor.

The exact one is read off Jacobians: Cov(z) = J diag(V) J^T for a convolution of independent inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.gaussian.normal import positive_probability
from momentprop.moments import Moments
from momentprop.rules.facts import neighbours_of
from momentprop.rules.registry import RULES

aten = torch.ops.aten


def rule(op: Any) -> Any:
    return RULES.find(op)


def moments(*shape: int) -> Moments:
    mean, variance = torch.randn(2, *shape, dtype=torch.float64)
    return Moments(mean, variance.exp())


def jacobian_covariance(function: Callable[[Tensor], Tensor], x: Moments) -> Tensor:
    """[*out, *out] of a linear function, inputs independent."""
    out = function(x.mean)
    jacobian = torch.func.jacrev(function)(x.mean).reshape(out.numel(), -1)
    return (jacobian * x.variance.flatten() @ jacobian.T).reshape(*out.shape, *out.shape)


def offsets(
    covariance: Tensor, n: int, start: list[int], step: list[int], count: list[int], shift: list[int]
) -> Tensor:
    """[batch, channels, *count]: Cov(z[b, c, start + i step], z[b, c, start + shift + i step])."""
    letters = "xyz"[:n], "uvw"[:n]
    within = torch.einsum(f"bc{letters[0]}bc{letters[1]}->bc{letters[0]}{letters[1]}", covariance)
    along = [a + k * torch.arange(c) for a, k, c in zip(start, step, count, strict=True)]
    here = torch.meshgrid(*along, indexing="ij")
    there = [p + d for p, d in zip(here, shift, strict=True)]
    return within[(slice(None), slice(None), *here, *there)]


def assert_told(z: Moments, covariance: Tensor, n: int) -> int:
    """At all offsets, and every position at which both elements exist; how many offsets were not zero."""
    sizes = z.shape[-n:]
    told = neighbours_of(z)
    assert told is not None
    not_zero = 0
    for shift in itertools.product(*[range(-s + 1, s) for s in sizes]):
        if not any(shift):
            continue
        start = [max(-d, 0) for d in shift]
        count = [s - abs(d) for s, d in zip(sizes, shift, strict=True)]
        expected = offsets(covariance, n, start, [1] * n, count, list(shift))
        out = told(start, [1] * n, count, list(shift))
        if out is None:
            assert not expected.any(), f"zero is told at {shift}"
        else:
            not_zero += bool(expected.any())
            torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11, msg=f"at {shift}")
    return not_zero


CONVOLUTIONS = [
    (1, (2, 2, 7), (3, 2, 3), {}),
    (1, (1, 2, 9), (3, 2, 4), {"stride": 2}),
    (1, (1, 2, 9), (2, 2, 3), {"dilation": 2}),
    (1, (1, 2, 9), (2, 2, 3), {"stride": 2, "dilation": 3, "padding": 3}),
    (1, (1, 2, 9), (2, 2, 5), {"stride": 3, "dilation": 2, "padding": 4}),
    (1, (1, 4, 6), (4, 2, 3), {"groups": 2, "padding": 1}),
    (1, (1, 2, 6), (2, 2, 3), {"padding": "same"}),
    (1, (1, 2, 6), (2, 2, 4), {"padding": "same"}),
    (1, (1, 2, 6), (2, 2, 4), {"padding": "valid", "stride": 2}),
    (2, (2, 2, 5, 4), (3, 2, 3, 3), {}),
    (2, (1, 2, 5, 6), (2, 2, 3, 2), {"stride": [2, 1], "padding": [1, 0]}),
    (2, (1, 2, 6, 5), (2, 2, 2, 3), {"dilation": [2, 1], "padding": 2}),
    (2, (1, 4, 4, 4), (4, 1, 3, 3), {"groups": 4, "padding": 1}),
    (2, (1, 2, 4, 5), (2, 2, 2, 4), {"padding": "same"}),
    (2, (1, 2, 5, 5), (2, 2, 3, 3), {"padding": "same", "dilation": [2, 1]}),
    (2, (1, 2, 4, 4), (2, 2, 1, 1), {}),
    (3, (1, 2, 3, 3, 4), (2, 2, 2, 2, 2), {}),
    (3, (1, 2, 3, 4, 3), (2, 1, 2, 3, 2), {"stride": [1, 2, 1], "padding": [1, 1, 0], "groups": 2}),
    (3, (1, 1, 3, 3, 3), (2, 1, 3, 2, 1), {"padding": "same"}),
]


def convolution(
    n: int, weight: Tensor, options: dict[str, Any]
) -> tuple[Callable[[Tensor], Tensor], Callable[..., Any]]:
    """The plain function, and the rule with the same arguments."""
    per_dimension = {
        k: [v] * n if isinstance(v, int) and k != "groups" else v
        for k, v in {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **options}.items()
    }
    packet = getattr(aten, f"conv{n}d")
    op = packet.padding if isinstance(per_dimension["padding"], str) else packet.default
    bias = torch.randn(weight.shape[0], dtype=weight.dtype)
    arguments = (weight, bias, *per_dimension.values())
    return (lambda x: op(x, *arguments)), (lambda x: rule(op)(x, *arguments))


# torch says so once per process, for the plain convolution too
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("n", "shape", "kernel", "options"), CONVOLUTIONS, ids=str)
def test_convolutions_tell_the_exact_covariance(
    n: int, shape: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any]
) -> None:
    x, weight = moments(*shape), torch.randn(kernel, dtype=torch.float64)
    plain, propagate = convolution(n, weight, options)
    not_zero = assert_told(propagate(x), jacobian_covariance(plain, x), n)
    assert (not_zero > 0) == (max(kernel[2:]) > 1)  # windows of one element share nothing


@pytest.mark.parametrize(
    ("start", "step", "count", "shift"),
    [
        ([0, 0], [2, 2], [2, 2], [0, 1]),
        ([1, 0], [2, 3], [2, 2], [-1, 1]),
        ([0, 1], [3, 1], [1, 3], [2, 1]),
        ([2, 2], [1, 2], [2, 1], [-2, -1]),
    ],
    ids=str,
)
def test_only_where_it_is_asked_for(
    start: list[int], step: list[int], count: list[int], shift: list[int]
) -> None:
    """On any lattice of positions, as pooling asks for its windows."""
    x, weight = moments(2, 2, 7, 7), torch.randn(3, 2, 3, 3, dtype=torch.float64)
    for options in ({"padding": 1}, {"stride": 1, "dilation": 2, "padding": 2}):
        plain, propagate = convolution(2, weight, options)
        told = neighbours_of(propagate(x))(start, step, count, shift)
        expected = offsets(jacobian_covariance(plain, x), 2, start, step, count, shift)
        if told is None:
            assert not expected.any()
        else:
            torch.testing.assert_close(told, expected)


@pytest.mark.parametrize(
    ("options", "shares", "apart"),
    [
        ({}, [(0, 2), (2, 2), (-2, 1)], [(0, 3), (3, 0), (-3, 3)]),
        ({"stride": 2}, [(0, 1), (-1, 1)], [(0, 2), (2, 0)]),
        ({"stride": 3}, [], [(0, 1), (1, 0)]),
        ({"dilation": 2}, [(0, 2), (4, -4)], [(0, 1), (1, 2), (0, 6)]),
    ],
    ids=str,
)
def test_none_beyond_the_kernel(
    options: dict[str, Any], shares: list[tuple[int, int]], apart: list[tuple[int, int]]
) -> None:
    """Zero is told as None, without computing it: outputs that share no input."""
    x, weight = moments(1, 2, 20, 20), torch.randn(2, 2, 3, 3, dtype=torch.float64)
    told = neighbours_of(convolution(2, weight, options)[1](x))
    for shift in shares:
        assert told([8, 8], [1, 1], [1, 1], list(shift)) is not None
    for shift in apart:
        assert told([8, 8], [1, 1], [1, 1], list(shift)) is None


class TestThroughOperators:
    """Element by element the covariance is scaled by the gains of both elements; noise leaves it alone."""

    @pytest.fixture(autouse=True)
    def inputs(self) -> None:
        self.x, self.weight = moments(2, 2, 4, 5), torch.randn(3, 2, 3, 3, dtype=torch.float64)

    def convolved(self) -> tuple[Moments, Tensor]:
        """z, and its exact covariance."""
        plain, propagate = convolution(2, self.weight, {"padding": 1})
        return propagate(self.x), jacobian_covariance(plain, self.x)

    def assert_scaled(self, out: Moments, gain: Any) -> None:
        """By gain, which broadcasts to z."""
        z, covariance = self.convolved()
        full = torch.as_tensor(gain, dtype=z.dtype).expand(z.shape)
        expected = full.reshape(*z.shape, *[1] * 4) * covariance * full
        assert assert_told(out, expected, 2) > 0

    @pytest.mark.parametrize("affine", [True, False])
    def test_batch_norm(self, affine: bool) -> None:
        z, _ = self.convolved()
        gamma, beta, mean = torch.randn(3, 3, dtype=torch.float64)
        variance = torch.rand(3, dtype=torch.float64) + 0.5
        out = rule(aten.batch_norm.default)(
            z, gamma if affine else None, beta if affine else None, mean, variance, False, 0.1, 1e-5, False
        )
        scale = (variance + 1e-5).rsqrt() * (gamma if affine else 1)
        self.assert_scaled(out, scale[:, None, None])

    @pytest.mark.parametrize(
        "shape", [(), (1,), (5,), (4, 5), (3, 1, 1), (3, 1, 5), (2, 1, 1, 1), (2, 3, 4, 5)]
    )
    def test_products_and_quotients(self, shape: tuple[int, ...]) -> None:
        z, _ = self.convolved()
        factor = torch.randn(shape, dtype=torch.float64) + 2
        self.assert_scaled(rule(aten.mul.Tensor)(z, factor), factor)
        self.assert_scaled(rule(aten.mul.Tensor)(factor, z), factor)
        self.assert_scaled(rule(aten.div.Tensor)(z, factor), 1 / factor)

    @pytest.mark.parametrize("number", [2.5, -3, 0])
    def test_numbers(self, number: float) -> None:
        z, covariance = self.convolved()
        if number:
            self.assert_scaled(rule(aten.mul.Tensor)(z, number), number)
            self.assert_scaled(rule(aten.mul.Scalar)(z, number), number)
            self.assert_scaled(rule(aten.div.Tensor)(z, number), 1 / number)
        else:
            assert_told(rule(aten.mul.Tensor)(z, number), 0 * covariance, 2)
        self.assert_scaled(rule(aten.add.Tensor)(z, number), 1)
        self.assert_scaled(rule(aten.neg.default)(z), -1)

    def test_sums_with_constants(self) -> None:
        z, _ = self.convolved()
        constant = torch.randn(3, 1, 1, dtype=torch.float64)
        for op in (aten.add.Tensor, aten.sub.Tensor):
            self.assert_scaled(rule(op)(z, constant, alpha=3), 1)
            self.assert_scaled(rule(op)(constant, z, alpha=3), 3)
        self.assert_scaled(rule(aten.rsub.Scalar)(z, 2, 3), 3)
        self.assert_scaled(rule(aten.rsub.Tensor)(z, constant, alpha=-2), 2)

    def test_relu(self) -> None:
        z, _ = self.convolved()
        self.assert_scaled(rule(aten.relu.default)(z), positive_probability(z.mean, z.variance))

    @pytest.mark.parametrize("p", [0.1, 0.5])
    def test_dropout_leaves_it(self, p: float) -> None:
        """Masks are independent: Cov(m1 z1, m2 z2) = E[m1] E[m2] Cov(z1, z2), with means one."""
        z, _ = self.convolved()
        self.assert_scaled(rule(aten.dropout.default)(z, p, True), 1)

    @pytest.mark.parametrize("p", [0.1, 0.5])
    def test_channel_dropout(self, p: float) -> None:
        """One mask m for a channel, E[m^2] = 1/(1-p): Cov(m z1, m z2) = (Cov + p E1 E2) / (1-p)."""
        z, covariance = self.convolved()
        products = z.mean.reshape(*z.shape, *[1] * 4) * z.mean
        out = rule(aten.feature_dropout.default)(z, p, True)
        assert assert_told(out, (covariance + p * products) / (1 - p), 2) > 0
        plain = rule(aten.feature_dropout.default)(z.mean, p, True)  # noise begins here
        assert assert_told(plain, p / (1 - p) * products, 2) > 0

    def test_a_row_of_them(self) -> None:
        z, _ = self.convolved()
        scale = torch.randn(3, 1, 1, dtype=torch.float64)
        y = rule(aten.mul.Tensor)(z, scale)
        out = rule(aten.neg.default)(rule(aten.dropout.default)(rule(aten.relu.default)(y), 0.5, True))
        self.assert_scaled(out, -scale * positive_probability(y.mean, y.variance))

    def test_switched_off_dropout_is_no_step(self) -> None:
        z, _ = self.convolved()
        for op in (aten.dropout.default, aten.feature_dropout.default):
            self.assert_scaled(rule(op)(z, 0.5, False), 1)

    @pytest.mark.parametrize(
        "forget",
        [
            lambda z: rule(aten.add.Tensor)(z, z),  # two random tensors
            lambda z: rule(aten.mul.Tensor)(z, torch.ones(2, 2, 3, 4, 5).double()),  # broadcast
            lambda z: rule(aten.permute.default)(z, [0, 1, 3, 2]),
            lambda z: rule(aten.reshape.default)(z, [2, 3, 20]),
            lambda z: rule(aten.avg_pool2d.default)(z, [2, 2]),
        ],
        ids=["sum of two", "broadcast", "permute", "reshape", "pool"],
    )
    def test_everything_else_forgets(self, forget: Callable[[Moments], Moments]) -> None:
        z, _ = self.convolved()
        assert neighbours_of(forget(z)) is None


def test_pooling_in_a_network_sees_it() -> None:
    """From the convolution through batch norm and dropout to the pool: the mean of the maximum falls."""
    model = nn.Sequential(
        nn.Dropout(0.5), nn.Conv2d(2, 3, 3), nn.ReLU(), nn.BatchNorm2d(3), nn.Dropout(0.1), nn.MaxPool2d(2)
    )
    nn.init.uniform_(model[1].weight, 0, 1)
    x = torch.rand(2, 2, 10, 10)
    means = {tier: mp.convert(model.eval(), x, tier)(x).mean for tier in ("paper", "fast")}
    assert (means["fast"] < means["paper"]).all()
    assert F.l1_loss(means["fast"], means["paper"]) > 0.05
