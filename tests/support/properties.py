"""What every rule has to satisfy, over lists of settings of its operator.

A test file lists settings (rule_settings.py) and inherits the properties:

    @pytest.mark.parametrize("setting", SETTINGS, ids=str)
    class TestConvolution(LinearRule): ...

There are four tests for each setting, made of `check_` methods, one for each property; a class of rules that
has another property overrides the method.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from linear_part import LinearPart, flat, random_arguments, unit_rows
from momentprop.moments import Moments, is_moments, mean_of
from rule_settings import Distribution, Setting, extreme, fixed, moderate, reason_of

DTYPES = (torch.float32, torch.float64)
DRAWS: dict[str, Distribution] = {
    "moderate": moderate,
    "V=0": fixed(variance=0.0),
    "E=0": fixed(mean=0.0),
    "E=V=0": fixed(0.0, 0.0),
    "extreme": extreme,
}


def scale_of(reference: Tensor) -> Tensor:
    """Each value, but no less than the typical one: what rounding errors of sums are relative to."""
    return reference.abs() + reference.abs().mean()


def explained(text: str) -> Callable[[str], str]:
    """A message of `torch.testing.assert_close` that begins with the property."""
    return lambda message: f"{text}\n{message}"


def assert_exact(value: Tensor, reference: Tensor, text: str) -> None:
    """Equal but for rounding in float64."""
    torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12, msg=explained(text))


@dataclass
class Samples:
    """Mean and variance of samples [n, ...] with their standard errors."""

    values: Tensor

    def __post_init__(self) -> None:
        n = self.values.shape[0]
        self.mean = self.values.mean(0)
        squares = (self.values - self.mean).square_()
        self.variance = squares.sum(0) / (n - 1)
        fourth = squares.square_().mean(0)
        self.mean_error = (self.variance / n).sqrt()
        self.variance_error = ((fourth - (n - 3) / (n - 1) * self.variance**2).clamp_min(0) / n).sqrt()

    def assert_agrees(self, moments: Moments, n_errors: float = 5) -> None:
        # the second term is for elements that are constant but for rounding
        tolerance = n_errors * self.mean_error + 1e-12 * scale_of(self.mean)
        assert ((moments.mean - self.mean).abs() <= tolerance).all(), "mean against sampling"
        tolerance = n_errors * self.variance_error + 1e-12 * scale_of(self.variance)
        assert ((moments.variance - self.variance).abs() <= tolerance).all(), "variance against sampling"


def gaussian_samples(x: Moments, n: int) -> Tensor:
    return x.mean + x.std * torch.randn(n, *x.shape, dtype=x.dtype)


class AnyRule:
    """Properties of every rule; a test class adds `setting` by parametrization."""

    draws: int = 4
    unexplained: float = 0.0  # share of the variance that the linear part and noise may miss ...
    overexplained: float = 0.0  # ... or exceed

    def test_values(self, setting: Setting) -> None:
        self.check_agrees_with_sampling(setting)
        self.check_is_the_operator_where_variance_vanishes(setting)
        self.check_plain_tensors_run_the_operator(setting)
        assert reason_of(setting) is None, "the rule accepts its arguments"

    def test_linear_part(self, setting: Setting) -> None:
        args = setting.arguments()
        if setting.rule.variant is not None and setting.rule.propagate(*args).linearize is None:
            pytest.skip("a rule of one tier alone that does not sweep back")
        for x in random_arguments(args):
            x.mean.requires_grad_()
        part = setting.linear_part(args)
        self.check_linear_part_is_the_derivative(part)
        self.check_linear_part_and_noise_make_up_the_variance(part)

    def test_extremes_and_gradients(self, setting: Setting) -> None:
        self.check_extremes(setting)
        for name, draw in DRAWS.items():
            self.check_gradients_are_finite(setting, name, draw)

    def test_dtypes(self, setting: Setting) -> None:
        single = setting.propagate(setting.arguments(torch.float32))
        double = setting.propagate(setting.arguments(torch.float64))
        for low, high in zip(single, double, strict=True):
            mean, variance = (low.mean - high.mean).abs(), (low.variance - high.variance).abs()
            assert (mean <= 1e-5 * scale_of(high.mean)).all(), "the mean in float32 is near float64"
            assert (variance <= 1e-5 * scale_of(high.variance)).all(), "the variance in float32 is near"

    def sample(self, setting: Setting, args: tuple[Any, ...]) -> list[Tensor]:
        """Samples of the outputs: the operator itself at Gaussian inputs."""
        values = [gaussian_samples(x, setting.n_samples) for x in random_arguments(args)]
        return setting.apply_to_many(args, values)

    def check_agrees_with_sampling(self, setting: Setting) -> None:
        """Some rules are compared with sampling by tests of their own."""

    def check_is_the_operator_where_variance_vanishes(self, setting: Setting) -> None:
        for variance in (0.0, 1e-24):
            args = setting.arguments(draw=fixed(variance=variance))
            for out, reference in zip(setting.propagate(args), setting.apply(args), strict=True):
                for moment in (out.mean, out.variance):
                    assert moment.shape == reference.shape, "shape of the output"
                    assert moment.dtype == reference.dtype, "type of the output"
                error = (out.mean - reference).abs()
                assert (error <= 1e-10 * scale_of(reference)).all(), "without variance: the operator itself"
                assert (out.variance <= 1e3 * variance).all(), "without variance: no variance"

    def check_plain_tensors_run_the_operator(self, setting: Setting) -> None:
        plain = pytree.tree_map(mean_of, setting.arguments(torch.float32), is_leaf=is_moments)
        outputs = flat(setting.rule(*plain, **setting.kwargs))
        for out, reference in zip(outputs, flat(setting.op(*plain, **setting.kwargs)), strict=True):
            assert isinstance(out, Tensor), "plain tensors give plain tensors"
            assert torch.equal(out, reference), "plain tensors run the operator"

    def check_linear_part_is_the_derivative(self, part: LinearPart) -> None:
        """Rules that are not exact for Gaussian inputs may have another one."""

    def check_linear_part_and_noise_make_up_the_variance(self, part: LinearPart) -> None:
        """V_out = J V J^T + noise, element by element, for independent inputs."""
        for i, out in enumerate(part.outputs):
            expected = part.noise_variance if i == 0 else torch.zeros_like(out.mean)
            for x, pulled in zip(part.inputs, part.pulled(unit_rows(out.mean), i), strict=True):
                share = (pulled.square() * x.variance).reshape(out.mean.numel(), x.mean.numel()).sum(1)
                expected = expected + share.reshape(out.shape)
            more, less = (limit * out.variance + 1e-10 for limit in (self.overexplained, self.unexplained))
            assert (out.variance - expected <= less).all(), "linear part and noise explain the variance"
            assert (expected - out.variance <= more).all(), "linear part and noise explain no more than that"

    def check_extremes(self, setting: Setting) -> None:
        for dtype, seed in itertools.product(DTYPES, range(self.draws)):
            for out in setting.propagate(setting.arguments(dtype, extreme, seed)):
                assert out.dtype == dtype, "type of the output at extremes"
                assert out.mean.isfinite().all(), f"finite mean at extremes, {dtype}"
                assert out.variance.isfinite().all(), f"finite variance at extremes, {dtype}"
                assert (out.variance >= 0).all(), f"variance not negative at extremes, {dtype}"

    def check_gradients_are_finite(self, setting: Setting, name: str, draw: Distribution) -> None:
        for dtype in DTYPES:
            args = setting.arguments(dtype, draw)
            leaves = setting.differentiable(args)
            for leaf in leaves:
                leaf.requires_grad_()
            outputs = setting.propagate(args)
            loss = sum((o.mean * torch.randn_like(o.mean) + o.variance).sum() for o in outputs)
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            finite = all(g is None or g.isfinite().all() for g in gradients)
            assert finite, f"finite gradients at {name}, {dtype}"
            if draw is moderate:
                reached = {id(t): g is not None and g.any() for t, g in zip(leaves, gradients, strict=True)}
                for x in random_arguments(args):
                    assert reached[id(x.mean)], "gradients reach the mean"
                    assert reached[id(x.variance)], "gradients reach the variance"


class SampledRule(AnyRule):
    """A rule that is exact for independent Gaussian inputs."""

    def check_agrees_with_sampling(self, setting: Setting) -> None:
        args = setting.arguments()
        for out, values in zip(setting.propagate(args), self.sample(setting, args), strict=True):
            Samples(values).assert_agrees(out)

    def check_linear_part_is_the_derivative(self, part: LinearPart) -> None:
        inputs = [x.mean for x in part.inputs]
        for i, out in enumerate(part.outputs):
            rows = torch.randn(3, *out.shape, dtype=out.dtype)
            expected = [
                torch.autograd.grad(out.mean, inputs, row, retain_graph=True, materialize_grads=True)
                for row in rows
            ]
            for mine, theirs in zip(part.pulled(rows, i), zip(*expected, strict=True), strict=True):
                message = explained("the linear part is the derivative of the mean")
                torch.testing.assert_close(mine, torch.stack(theirs), rtol=1e-9, atol=1e-9, msg=message)


class ApproximateRule(AnyRule):
    """A rule that is close to sampling: errors of the mean, in standard deviations, and of the variance."""

    mean_bound: float
    variance_bound: float

    def check_agrees_with_sampling(self, setting: Setting) -> None:
        args = setting.arguments()
        (values,) = self.sample(setting, args)
        out, sampled = setting.propagate(args)[0], Samples(values)
        error = (out.mean - sampled.mean).abs() - 5 * sampled.mean_error
        assert (error <= self.mean_bound * sampled.variance.sqrt()).all(), "mean against sampling"
        error = (out.variance - sampled.variance).abs() - 5 * sampled.variance_error
        assert (error <= self.variance_bound * sampled.variance).all(), "variance against sampling"


class LinearRule(SampledRule):
    """A rule for y = J x + b: besides sampling, against the variance (J*J) V with J read off the operator."""

    def check_agrees_with_sampling(self, setting: Setting) -> None:
        super().check_agrees_with_sampling(setting)
        self.check_agrees_with_the_jacobian(setting)

    def check_agrees_with_the_jacobian(self, setting: Setting) -> None:
        args = setting.arguments()
        inputs = random_arguments(args)
        zeros = [torch.zeros(1, *x.shape, dtype=x.dtype) for x in inputs]
        origin = setting.apply_to_many(args, zeros)
        outputs = setting.propagate(args)
        expected = [torch.zeros_like(out.variance) for out in outputs]
        for i, x in enumerate(inputs):
            n = x.mean.numel()
            values = [unit_rows(x.mean) if j == i else z.expand(n, *z.shape[1:]) for j, z in enumerate(zeros)]
            columns = setting.apply_to_many(args, values)
            for k, (column, at_zero) in enumerate(zip(columns, origin, strict=True)):
                expected[k] += torch.einsum("n...,n->...", (column - at_zero).square(), x.variance.flatten())
        for out, reference, variance in zip(outputs, setting.apply(args), expected, strict=True):
            assert_exact(out.mean, reference, "the mean is the operator at the mean")
            assert_exact(out.variance, variance, "V_out = (J*J) V")


def check_gradients(setting: Setting, draw: Distribution = moderate) -> None:
    """Gradients against finite differences."""
    args = setting.arguments(draw=draw)
    inputs = setting.differentiable(args)

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        replacement = {id(old): new for old, new in zip(inputs, given, strict=True)}
        swapped = pytree.tree_map(lambda leaf: replacement.get(id(leaf), leaf), args)
        outputs = setting.propagate(swapped)
        return tuple(t for o in outputs for t in (o.mean, o.variance))

    assert torch.autograd.gradcheck(run, [t.clone().requires_grad_() for t in inputs], fast_mode=True)
