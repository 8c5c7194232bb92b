"""Gains derived at conversion: the derivative of the mean by the mean, as a program of plain operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._ops import OpOverload

import momentprop as mp
from exact import accurate
from momentprop.capture.trace import trace
from momentprop.engine.derive import Derived, derived
from momentprop.moments import Moments
from momentprop.rules.linearization import Propagated, scaled
from momentprop.rules.registry import RULES, rule
from networks import Apply

aten = torch.ops.aten


def sine(x: Moments) -> Moments:
    """Exact for Gaussian x."""
    shrink = (-x.variance / 2).exp()
    mean = torch.sin(x.mean) * shrink
    second = (1 - torch.cos(2 * x.mean) * shrink**4) / 2
    return Moments(mean, second - mean * mean)


def gain_of_sine(x: Moments) -> Tensor:
    return torch.cos(x.mean) * (-x.variance / 2).exp()


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(F.dropout(x, 0.5, self.training), self.weight)


def at_node(op: OpOverload, function: Callable[..., Tensor]) -> Derived:
    """The rule, with its gain, at the one node of a traced model that calls this operator."""
    made = trace(Function(function), torch.randn(2, 3, dtype=torch.float64))
    (node,) = [n for n in made.graph.nodes if n.target is op]
    random: set[fx.Node] = set()
    for n in made.graph.nodes:
        if "dropout" in n.name or random.intersection(n.all_input_nodes):
            random.add(n)
    found = derived(node, RULES.find(op), random)
    assert isinstance(found, Derived)
    return found


def first_order(operator: Derived, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The gain, and the noise that is left."""
    linearization = operator.propagate(*args, **kwargs).linearize()
    (noise,) = linearization.noise
    return linearization.map.gain, noise.variance


def moments(*shape: int) -> Moments:
    mean, variance = torch.randn(2, *shape, dtype=torch.float64)
    return Moments(mean, variance.exp())


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_closed_form(batch: int) -> None:
    """For any batch, and with what the gain does not explain as noise."""
    rule(aten.sin.default, elementwise=True, override=True)(sine)
    operator = at_node(aten.sin.default, lambda x, w: torch.sin(x))
    x = moments(batch, 3)
    out = sine(x)
    gain, noise = first_order(operator, x)
    torch.testing.assert_close(gain, gain_of_sine(x))
    torch.testing.assert_close(noise, out.variance - gain_of_sine(x) ** 2 * x.variance)
    assert (noise >= 0).all()


def test_plain_operators_are_left() -> None:
    """Nothing of autograd or torch.func: it compiles and exports like the rest."""
    rule(aten.sin.default, elementwise=True, override=True)(sine)
    program = at_node(aten.sin.default, lambda x, w: torch.sin(x)).gain
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert targets
    assert all(isinstance(t, OpOverload) and t.namespace == "aten" for t in targets)
    x = moments(5, 3)
    with torch.inference_mode():
        torch.testing.assert_close(program(x.variance, x.mean), gain_of_sine(x))


def test_variance_is_held_fixed() -> None:
    """A mean that depends on the variance too: only its derivative by the mean counts."""

    @rule(aten.square.default, elementwise=True, override=True)
    def square(x: Moments) -> Moments:
        return Moments(x.mean**2 + x.variance, 2 * x.variance**2 + 4 * x.mean**2 * x.variance)

    operator = at_node(aten.square.default, lambda x, w: torch.square(x))
    x = moments(4, 3)
    gain, noise = first_order(operator, x)
    torch.testing.assert_close(gain, 2 * x.mean)
    torch.testing.assert_close(noise, 2 * x.variance**2)


def scaled_sine(first: Any, second: Any) -> Moments:
    """atan2 has two arguments: here sin(x) w, with either of them random."""
    x, w = (first, second) if isinstance(first, Moments) else (second, first)
    out = sine(x)
    return Moments(out.mean * w, out.variance * w * w)


@pytest.mark.parametrize("first", [True, False])
def test_other_arguments(first: bool) -> None:
    """Constant tensors, before or after the random one; the weight's own value at the time of the call."""
    rule(aten.atan2.default, elementwise=True, override=True)(scaled_sine)
    call = (lambda x, w: torch.atan2(x, w)) if first else (lambda x, w: torch.atan2(w, x))
    operator = at_node(aten.atan2.default, call)
    x, w = moments(5, 3), torch.randn(3, dtype=torch.float64)
    args = (x, w) if first else (w, x)
    gain, _ = first_order(operator, *args)
    torch.testing.assert_close(gain, gain_of_sine(x) * w)


def test_numbers_and_keywords() -> None:
    """Arguments that are no tensors keep the value they were traced with."""

    @rule(aten.add.Tensor, elementwise=True, override=True)
    def add(x: Moments, y: Any, *, alpha: float = 1) -> Moments:
        return Moments(alpha * y * x.mean, (alpha * y) ** 2 * x.variance)

    operator = at_node(aten.add.Tensor, lambda x, w: torch.add(x, 3.0, alpha=2))
    x = moments(5, 3)
    gain, noise = first_order(operator, x, 3.0, alpha=2)
    torch.testing.assert_close(gain, torch.full_like(x.mean, 6.0))
    assert not noise.any()


def test_a_mean_that_does_not_depend_on_the_input() -> None:
    """Gain zero: all of the variance is fresh noise."""

    @rule(aten.sign.default, elementwise=True, override=True)
    def sign(x: Moments) -> Moments:
        return Moments(torch.zeros_like(x.mean), torch.ones_like(x.mean))

    operator = at_node(aten.sign.default, lambda x, w: torch.sign(x))
    x = moments(5, 3)
    gain, noise = first_order(operator, x)
    assert not gain.any()
    assert torch.equal(noise, torch.ones_like(x.mean))


def test_noise_is_never_negative() -> None:
    """A rule whose variance is too small for its gain."""

    @rule(aten.exp.default, elementwise=True, override=True)
    def exp(x: Moments) -> Moments:
        return Moments(x.mean.exp(), 0.5 * x.variance * x.mean.exp() ** 2)

    operator = at_node(aten.exp.default, lambda x, w: torch.exp(x))
    x = moments(5, 3)
    assert not first_order(operator, x)[1].any()


def test_gradients_pass_the_gain() -> None:
    rule(aten.sin.default, elementwise=True, override=True)(sine)
    operator = at_node(aten.sin.default, lambda x, w: torch.sin(x))
    mean, variance = moments(2, 3).mean.requires_grad_(), moments(2, 3).variance.requires_grad_()
    assert torch.autograd.gradcheck(lambda e, v: operator.gain(v, e), (mean, variance))


def test_an_input_that_is_broadcast() -> None:
    """Each output element depends on one element of x, though several on the same one.

    One element then reaches several, for which there is no gain: refused, with the place.
    """
    rule(aten.atan2.default, elementwise=True, override=True)(
        lambda x, w: Moments(x.mean * w, x.variance * w * w)
    )

    class Broadcasts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.atan2(F.dropout(x, 0.5, self.training), torch.tensor([1.0, -2.0, 3.0]))

    x = torch.tensor([[2.0], [3.0]])
    with pytest.raises(mp.CovarianceError, match=r"random input is broadcast(.|\n)*aten\.atan2"):
        mp.convert(Broadcasts(), x, "accurate")


def test_a_rule_that_cannot_be_derived_is_reported_with_its_place() -> None:
    """Here: it looks at values, which are not known at conversion."""

    @rule(aten.sin.default, elementwise=True, override=True)
    def looks(x: Moments) -> Moments:
        return sine(x) if x.mean.sum() > 0 else x

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3), nn.Sequential(Inner()))
    x = torch.randn(2, 3)
    with pytest.raises(mp.CovarianceError, match="the gain of a rule could not be derived") as error:
        mp.convert(model, x, "accurate")
    assert "aten.sin.default  in 2.0" in str(error.value)
    assert "return torch.sin(x)" in str(error.value)
    with pytest.warns(mp.FidelityNote, match="could not be derived"):
        assert mp.convert(model, x).fidelity == "fast"


def sine_network() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(4, 40), nn.Dropout(0.5), nn.Linear(40, 20), Apply(torch.sin, "sin"), nn.Linear(20, 2)]
    return nn.Sequential(*layers).double(), torch.randn(3, 4, dtype=torch.float64)


def test_a_rule_without_a_linear_part() -> None:
    """Accurate says what to do, and where; auto falls back, and says so; fast does not need it."""
    rule(aten.sin.default, override=True)(sine)
    model, x = sine_network()
    with pytest.raises(mp.MissingRuleError, match="give it elementwise=True or return Propagated") as error:
        mp.convert(model, x, "accurate")
    assert error.value.places[0].module == "3"
    assert error.value.places[0].operator == "aten.sin.default"
    fast = mp.convert(model, x, "fast")(x)
    with pytest.warns(mp.FidelityNote, match="give it elementwise=True or return Propagated"):
        bnn = mp.convert(model, x)
    torch.testing.assert_close(bnn(x).variance, fast.variance)


def test_the_same_covariance_as_with_the_gain_given() -> None:
    model, x = sine_network()
    rule(aten.sin.default, elementwise=True, override=True)(sine)
    (found,) = accurate(model, x)

    @rule(aten.sin.default, elementwise=True, override=True)
    def with_gain(x: Moments) -> Propagated:
        out, gain = sine(x), gain_of_sine(x)
        return Propagated(out, lambda: scaled(gain, out.variance - gain**2 * x.variance))

    (given,) = accurate(model, x)
    torch.testing.assert_close(found.mean, given.mean)
    torch.testing.assert_close(found.covariance, given.covariance)


def test_agrees_with_sampling() -> None:
    """Standard deviations within 5 %, covariance within 5 % of the product of two."""
    model, x = sine_network()
    rule(aten.sin.default, elementwise=True, override=True)(sine)
    (out,) = accurate(model, x)
    samples = mp.monte_carlo(model, x, n_samples=20_000).samples
    for i in range(3):
        true = torch.cov(samples[:, i].T)
        std = true.diagonal().sqrt()
        assert ((out.std[i] / std - 1).abs() <= 0.05).all()
        assert ((out.covariance[i] - true).abs() <= 0.05 * torch.outer(std, std)).all()
