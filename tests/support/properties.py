"""What every rule has to satisfy, over lists of settings of its operator.

A setting is an operator with its arguments, where `X(2, 3)` stands for a random tensor of that shape and
`C(2, 3)` for a constant one. A test file lists settings and inherits the properties:

    @pytest.mark.parametrize("setting", SETTINGS, ids=str)
    class TestConvolution(LinearRule): ...
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

import momentprop.rules  # noqa: F401  (registers the rules)
from momentprop import tiers
from momentprop.graph.schema import bind
from momentprop.moments import Moments, is_moments, mean_of
from momentprop.rules.local import Elementwise
from momentprop.rules.registry import Rule

DTYPES = (torch.float32, torch.float64)

EXTREME_MEANS = (-1e6, -1e3, -1.0, -1e-6, -1e-30, 0.0, 1e-30, 1e-6, 1.0, 1e3, 1e6)
EXTREME_VARIANCES = (0.0, 1e-30, 1e-20, 1e-10, 1e-4, 1.0, 1e4, 1e12)


class X:
    """A random tensor."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __repr__(self) -> str:
        return "X" + "x".join(map(str, self.shape))


class C:
    """A constant tensor; `make(shape, generator)` draws other values than normal ones.

    Those are data rather than parameters: they need no gradient.
    """

    def __init__(self, *shape: int, make: Callable[..., Tensor] | None = None) -> None:
        self.shape, self.make = shape, make

    def __repr__(self) -> str:
        return "C" + "x".join(map(str, self.shape))


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def positive(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5


Distribution = Callable[[tuple[int, ...], torch.Generator], tuple[Tensor, Tensor]]


def moderate(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Means around 0 and variances around 1, as in a network."""
    mean, log_variance = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return mean, log_variance.exp()


def extreme(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each element from the corners of what has to work, in any combination."""

    def choose(values: tuple[float, ...]) -> Tensor:
        index = torch.randint(len(values), shape, generator=generator)
        return torch.tensor(values, dtype=torch.float64)[index]

    return choose(EXTREME_MEANS), choose(EXTREME_VARIANCES)


def fixed(mean: float | None = None, variance: float | None = None) -> Distribution:
    """`moderate`, but with this mean or variance everywhere."""

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        e, v = moderate(shape, generator)
        e = e if mean is None else torch.full_like(e, mean)
        return e, v if variance is None else torch.full_like(v, variance)

    return draw


@dataclass(frozen=True)
class Setting:
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    fidelity: str = "paper"
    n_samples: int = 4000
    vectorizes: bool = True  # torch.func.vmap can run it

    def __str__(self) -> str:
        given = [str(a).replace(" ", "") for a in self.args] + [f"{k}={v}" for k, v in self.kwargs.items()]
        tier = "" if self.fidelity == "paper" else f"[{self.fidelity}]"
        return f"{self.op.name().removeprefix('aten::')}{tier}({','.join(given)})"

    @property
    def rule(self) -> Rule:
        rule = tiers.named(self.fidelity).rules.find(self.op)
        assert rule is not None, f"{self.op} has no rule"
        return rule

    def arguments(
        self, dtype: torch.dtype = torch.float64, draw: Distribution = moderate, seed: int = 0
    ) -> tuple[Any, ...]:
        """The arguments with Moments for X and tensors for C: float32 numbers, in either dtype."""
        generator = torch.Generator().manual_seed(seed)

        def fill(value: Any) -> Any:
            if isinstance(value, X):
                mean, variance = draw(value.shape, generator)
                return Moments(mean.float().to(dtype), variance.float().to(dtype))
            if isinstance(value, C) and value.make is not None:
                made = value.make(value.shape, generator)
                return made.float().to(dtype) if made.is_floating_point() else made
            if isinstance(value, C):
                return torch.randn(value.shape, generator=generator).to(dtype)
            return [fill(v) for v in value] if isinstance(value, list) else value

        return tuple(fill(a) for a in self.args)

    def differentiable(self, args: tuple[Any, ...]) -> list[Tensor]:
        """Means and variances of the random arguments, and the constants that are parameters."""
        kinds = pytree.tree_leaves(self.args)
        values = pytree.tree_leaves(args, is_leaf=is_moments)
        wanted = [v for k, v in zip(kinds, values, strict=True) if isinstance(k, X) or is_parameter(k)]
        return [t for t in pytree.tree_leaves(wanted) if t is not None]

    def propagate(self, args: tuple[Any, ...]) -> list[Moments]:
        """The rule's outputs; where the operator returns a list, all of them."""
        out = self.rule(*args, **self.kwargs)
        return list(out) if isinstance(out, (list, tuple)) else [out]

    def apply(self, args: tuple[Any, ...]) -> list[Tensor]:
        """The operator itself at the means."""
        return flat(self.op(*pytree.tree_map(mean_of, args, is_leaf=is_moments), **self.kwargs))

    def apply_to_many(self, args: tuple[Any, ...], values: list[Tensor]) -> list[Tensor]:
        """The operator itself at many values of its random arguments, stacked in front."""
        leaves, spec = pytree.tree_flatten(args, is_leaf=is_moments)

        def run(*given: Tensor) -> Any:
            rest = iter(given)
            filled = [next(rest) if is_moments(leaf) else leaf for leaf in leaves]
            return tuple(flat(self.op(*pytree.tree_unflatten(filled, spec), **self.kwargs)))

        if self.vectorizes:
            return list(torch.func.vmap(run)(*values))
        return [torch.stack(outputs) for outputs in zip(*map(run, *values), strict=True)]


def setting(op: OpOverload, *args: Any, **kwargs: Any) -> Setting:
    return Setting(op, args, kwargs)


def flat(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, (list, tuple)) else [out]


def is_parameter(argument: Any) -> bool:
    return isinstance(argument, C) and argument.make is None


def random_arguments(args: tuple[Any, ...]) -> list[Moments]:
    return [leaf for leaf in pytree.tree_leaves(args, is_leaf=is_moments) if is_moments(leaf)]


def scale_of(reference: Tensor) -> Tensor:
    """Each value, but no less than the typical one: what rounding errors of sums are relative to."""
    return reference.abs() + reference.abs().mean()


@dataclass
class Samples:
    """Mean and variance of samples [n, ...] with their standard errors."""

    values: Tensor

    def __post_init__(self) -> None:
        n = self.values.shape[0]
        self.mean = self.values.mean(0)
        deviation = self.values - self.mean
        self.variance = deviation.square().sum(0) / (n - 1)
        fourth = deviation.pow(4).mean(0)
        self.mean_error = (self.variance / n).sqrt()
        self.variance_error = ((fourth - (n - 3) / (n - 1) * self.variance**2).clamp_min(0) / n).sqrt()

    def forget_values(self) -> Samples:
        """Keep the moments only."""
        self.values = self.values[:0]
        return self

    def assert_agrees(self, moments: Moments, n_errors: float = 5) -> None:
        # the second term is for elements that are constant but for rounding
        tolerance = n_errors * self.mean_error + 1e-12 * scale_of(self.mean)
        assert ((moments.mean - self.mean).abs() <= tolerance).all(), "mean"
        tolerance = n_errors * self.variance_error + 1e-12 * scale_of(self.variance)
        assert ((moments.variance - self.variance).abs() <= tolerance).all(), "variance"


def gaussian_samples(x: Moments, n: int) -> Tensor:
    return x.mean + x.std * torch.randn(n, *x.shape, dtype=x.dtype)


class AnyRule:
    """Properties of every rule; a test class adds `setting` by parametrization."""

    draws: int = 4
    unexplained: float = 0.0  # share of the variance that the linear part and noise may miss ...
    overexplained: float = 0.0  # ... or exceed

    def sample(self, setting: Setting, args: tuple[Any, ...]) -> list[Tensor]:
        """Samples of the outputs: the operator itself at Gaussian inputs."""
        values = [gaussian_samples(x, setting.n_samples) for x in random_arguments(args)]
        return setting.apply_to_many(args, values)

    def test_is_the_operator_where_variance_vanishes(self, setting: Setting) -> None:
        for variance in (0.0, 1e-24):
            args = setting.arguments(draw=fixed(variance=variance))
            for out, reference in zip(setting.propagate(args), setting.apply(args), strict=True):
                assert out.shape == reference.shape
                assert out.dtype == reference.dtype
                assert out.variance.shape == reference.shape
                assert out.variance.dtype == reference.dtype
                assert ((out.mean - reference).abs() <= 1e-10 * scale_of(reference)).all()
                assert (out.variance <= 1e3 * variance).all()

    def test_variance_is_finite_and_not_negative_at_extremes(self, setting: Setting) -> None:
        for dtype, seed in itertools.product(DTYPES, range(self.draws)):
            for out in setting.propagate(setting.arguments(dtype, extreme, seed)):
                assert out.dtype == dtype
                assert out.mean.isfinite().all()
                assert out.variance.isfinite().all()
                assert (out.variance >= 0).all()

    def test_float32_is_near_float64(self, setting: Setting) -> None:
        single = setting.propagate(setting.arguments(torch.float32))
        double = setting.propagate(setting.arguments(torch.float64))
        for low, high in zip(single, double, strict=True):
            assert ((low.mean - high.mean).abs() <= 1e-5 * scale_of(high.mean)).all()
            assert ((low.variance - high.variance).abs() <= 1e-5 * scale_of(high.variance)).all()

    @pytest.mark.parametrize(
        "draw",
        [moderate, fixed(variance=0.0), fixed(mean=0.0), fixed(0.0, 0.0), extreme],
        ids=["moderate", "V=0", "E=0", "E=V=0", "extreme"],
    )
    def test_gradients_are_finite(self, setting: Setting, draw: Distribution) -> None:
        for dtype in DTYPES:
            args = setting.arguments(dtype, draw)
            leaves = setting.differentiable(args)
            for leaf in leaves:
                leaf.requires_grad_()
            outputs = setting.propagate(args)
            loss = sum((o.mean * torch.randn_like(o.mean) + o.variance).sum() for o in outputs)
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            assert all(g is None or g.isfinite().all() for g in gradients)
            if draw is moderate:
                reached = {id(t): g is not None and g.any() for t, g in zip(leaves, gradients, strict=True)}
                for x in random_arguments(args):
                    assert reached[id(x.mean)]
                    assert reached[id(x.variance)]

    def test_plain_tensors_run_the_operator(self, setting: Setting) -> None:
        plain = pytree.tree_map(mean_of, setting.arguments(torch.float32), is_leaf=is_moments)
        outputs = flat(setting.rule(*plain, **setting.kwargs))
        for out, reference in zip(outputs, flat(setting.op(*plain, **setting.kwargs)), strict=True):
            assert isinstance(out, Tensor)
            assert torch.equal(out, reference)

    def test_accepts_its_arguments(self, setting: Setting) -> None:
        assert reason_of(setting) is None

    def test_linear_part_and_noise_make_up_the_variance(self, setting: Setting) -> None:
        """V_out = J V J^T + noise, element by element, for independent inputs."""
        args = setting.arguments()
        outputs = setting.propagate(args)
        expected = [noise.clone() for noise in noises_of(setting, args)]
        for i, out in enumerate(outputs):
            n = out.mean.numel()
            rows = torch.eye(n, dtype=out.dtype).reshape(n, *out.shape)
            for x, pulled in zip(random_arguments(args), pulled_of(setting, args, i, rows), strict=True):
                explained = (pulled.square() * x.variance).reshape(len(rows), x.mean.numel()).sum(1)
                expected[i] = expected[i] + explained.reshape(out.shape)
            assert (out.variance - expected[i] <= self.unexplained * out.variance + 1e-10).all()
            assert (expected[i] - out.variance <= self.overexplained * out.variance + 1e-10).all()


class SampledRule(AnyRule):
    """A rule that is exact for independent Gaussian inputs."""

    def test_agrees_with_sampling(self, setting: Setting) -> None:
        args = setting.arguments()
        for out, values in zip(setting.propagate(args), self.sample(setting, args), strict=True):
            Samples(values).assert_agrees(out)

    def test_linear_part_is_the_derivative_of_the_mean(self, setting: Setting) -> None:
        args = setting.arguments()
        inputs = [x.mean.requires_grad_() for x in random_arguments(args)]
        for i, out in enumerate(setting.propagate(args)):
            rows = torch.randn(3, *out.shape, dtype=out.dtype)
            expected = [
                torch.autograd.grad(out.mean, inputs, row, retain_graph=True, materialize_grads=True)
                for row in rows
            ]
            pulled = pulled_of(setting, args, i, rows)
            for mine, theirs in zip(pulled, zip(*expected, strict=True), strict=True):
                torch.testing.assert_close(mine, torch.stack(theirs), rtol=1e-9, atol=1e-9)


class ApproximateRule(AnyRule):
    """A rule that is close to sampling: errors of the mean, in standard deviations, and of the variance."""

    mean_bound: float
    variance_bound: float

    def test_agrees_with_sampling(self, setting: Setting) -> None:
        args = setting.arguments()
        (values,) = self.sample(setting, args)
        out, sampled = setting.propagate(args)[0], Samples(values)
        error = (out.mean - sampled.mean).abs() - 5 * sampled.mean_error
        assert (error <= self.mean_bound * sampled.variance.sqrt()).all()
        error = (out.variance - sampled.variance).abs() - 5 * sampled.variance_error
        assert (error <= self.variance_bound * sampled.variance).all()


class LinearRule(SampledRule):
    """A rule for y = J x + b: besides sampling, against the variance (J*J) V with J read off the operator."""

    def test_agrees_with_the_jacobian(self, setting: Setting) -> None:
        args = setting.arguments()
        inputs = random_arguments(args)
        zeros = [torch.zeros(1, *x.shape, dtype=x.dtype) for x in inputs]
        origin = setting.apply_to_many(args, zeros)
        outputs = setting.propagate(args)
        expected = [torch.zeros_like(out.variance) for out in outputs]
        for i, x in enumerate(inputs):
            n = x.mean.numel()
            units = torch.eye(n, dtype=x.dtype).reshape(n, *x.shape)
            values = [units if j == i else z.expand(n, *z.shape[1:]) for j, z in enumerate(zeros)]
            columns = setting.apply_to_many(args, values)
            for k, (column, at_zero) in enumerate(zip(columns, origin, strict=True)):
                expected[k] += torch.einsum("n...,n->...", (column - at_zero).square(), x.variance.flatten())
        for out, reference, variance in zip(outputs, setting.apply(args), expected, strict=True):
            torch.testing.assert_close(out.mean, reference, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(out.variance, variance, rtol=1e-12, atol=1e-12)


def local_of(setting: Setting, args: tuple[Any, ...]) -> Any:
    """The rule's linear part and noise at these arguments."""
    local = setting.rule.local
    if local is None and setting.rule.variant is not None:
        pytest.skip("a rule of one tier alone that does not sweep back")
    assert local is not None, f"{setting.op} has no linear part"
    return local(setting.rule(*args, **setting.kwargs), *args, **setting.kwargs)


def noises_of(setting: Setting, args: tuple[Any, ...]) -> list[Tensor]:
    """Variance of the noise each output gets from the rule itself."""
    outputs, local = setting.propagate(args), local_of(setting, args)
    noises = [torch.zeros_like(out.mean) for out in outputs]
    if local.noise is not None:
        noises[0] = noises[0] + local.noise
    if getattr(local, "spread", None) is not None:
        n = noises[0].numel()
        rows = torch.eye(n, dtype=noises[0].dtype).reshape(n, *noises[0].shape)
        noises[0] = noises[0] + local.spread(rows).square().reshape(n, -1).sum(1).reshape(noises[0].shape)
    return noises


def pulled_of(setting: Setting, args: tuple[Any, ...], index: int, rows: Tensor) -> list[Tensor]:
    """Cotangents of the random arguments, from those of one of the outputs."""
    local, inputs = local_of(setting, args), random_arguments(args)
    if isinstance(local, Elementwise):
        return [rows if local.gain is None else rows * local.gain for _ in inputs]
    outputs = setting.rule(*args, **setting.kwargs)
    cotangent: Any = rows
    if isinstance(outputs, (list, tuple)):
        cotangent = [rows if i == index else None for i in range(len(outputs))]
    pulled = [*local.pull(cotangent), *[None] * len(inputs)][: len(inputs)]
    return [
        torch.zeros(len(rows), *x.shape, dtype=rows.dtype) if c is None else c
        for c, x in zip(pulled, inputs, strict=True)
    ]


def reason_of(setting: Setting, *random: str) -> str | None:
    """Why the rule refuses: with the setting's random arguments, or with these by name."""
    arguments = bind(setting.op, setting.arguments(), setting.kwargs)
    if not random:
        random = tuple(k for k, v in arguments.items() if random_arguments((v,)))
    refuses = setting.rule.refuses
    return None if refuses is None else refuses(arguments, frozenset(random))


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


def check_bend(setting: Setting) -> None:
    """The second derivative that a rule states, against differences of the operator, at no variance."""
    args = setting.arguments(draw=fixed(variance=1e-16))
    inputs = random_arguments(args)
    local = setting.rule.local(setting.rule(*args, **setting.kwargs), *args, **setting.kwargs)  # type: ignore[misc]
    first, second = ([torch.randn(1, *x.shape, dtype=x.dtype) for x in inputs] for _ in range(2))
    step = 1e-4

    def at(a: float, b: float) -> Tensor:
        moved = zip(inputs, first, second, strict=True)
        values = [x.mean + step * (a * d + b * e) for x, d, e in moved]
        return setting.apply_to_many(args, values)[0]

    expected = (at(1, 1) - at(1, -1) - at(-1, 1) + at(-1, -1)) / (4 * step * step)
    torch.testing.assert_close(local.bend(first, second), expected, rtol=1e-4, atol=1e-5)
