import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import SampledRule, Samples, Setting, X, check_gradients, fixed, gaussian_samples, setting

from momentprop.moments import Moments

aten = torch.ops.aten

SETTINGS = [
    Setting(aten.relu.default, (X(),), n_samples=100_000),
    Setting(aten.relu.default, (X(20),), n_samples=100_000),
    Setting(aten.relu.default, (X(2, 3, 2, 2),), n_samples=100_000),
    Setting(aten.sigmoid.default, (X(),), n_samples=100_000),
    Setting(aten.sigmoid.default, (X(20),), n_samples=100_000),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestActivation(SampledRule):
    pass


@pytest.mark.parametrize("std", [1e-3, 1.0, 1e3])
def test_relu_agrees_with_sampling_around_its_kink(std):
    a = torch.linspace(-3, 6, 31, dtype=torch.float64)
    x = Moments(a * std, std**2)
    values = gaussian_samples(x, 200_000).relu()
    Samples(values).assert_agrees(setting(aten.relu.default).rule(x))


@pytest.mark.parametrize("mean", [None, 0.0], ids=["moderate", "E=0"])
def test_relu_gradients_are_right(mean):
    """At mean 0 in particular: there the plain operator has a kink, its moments have none."""
    check_gradients(setting(aten.relu.default, X(10)), fixed(mean=mean))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_relu_gain_is_the_probability_of_being_on(dtype):
    a = torch.linspace(-5, 5, 101, dtype=dtype, requires_grad=True)
    out = setting(aten.relu.default).rule(Moments(a, torch.ones_like(a)))
    (gain,) = torch.autograd.grad(out.mean.sum(), a)
    torch.testing.assert_close(gain, torch.special.ndtr(a.detach()), rtol=1e-4, atol=1e-6)


@given(
    mean=st.floats(-1e6, 1e6, width=32),
    variance=st.one_of(st.just(0.0), st.floats(-30, 12).map(lambda x: 10**x)),
)
def test_relu_stays_between_its_bounds(mean, variance):
    """max(E, 0) <= mean <= max(E, 0) + sqrt(V / 2 pi), and 0 <= variance <= V."""
    for dtype in (torch.float32, torch.float64):
        x = Moments(torch.tensor([mean], dtype=dtype), torch.tensor([variance], dtype=dtype))
        out = setting(aten.relu.default).rule(x)
        plain = x.mean.relu()
        rounding = 1 + 4 * torch.finfo(dtype).eps
        highest = plain + (variance / (2 * math.pi)) ** 0.5
        assert plain <= out.mean * rounding
        assert out.mean <= highest * rounding + 1e-15  # the floor below which a variance counts as that
        assert 0 <= out.variance <= x.variance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sigmoid_agrees_with_integration(dtype):
    """Mean, variance and gain, by the trapezoidal rule over 12 standard deviations, in float64."""
    mean = torch.tensor([-30.0, -8, -3, -1, -0.2, 0, 0.5, 2, 6, 20], dtype=torch.float64)[:, None]
    variance = 10 ** torch.linspace(-10, 5, 46, dtype=torch.float64)
    variance = torch.cat([variance, torch.tensor([0.299, 0.301], dtype=torch.float64)])
    z = torch.linspace(-12, 12, 40_001, dtype=torch.float64)
    weight = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    p = torch.sigmoid(mean[..., None] + variance.sqrt()[:, None] * z)
    exact_mean = torch.trapezoid(p * weight, z)
    exact = torch.trapezoid((p - exact_mean[..., None]) ** 2 * weight, z)
    gain = torch.trapezoid(p * (1 - p) * weight, z)
    x = Moments(mean.expand_as(exact).to(dtype), variance.expand_as(exact).to(dtype))
    rule = setting(aten.sigmoid.default).rule
    out = rule(x)
    precision = 2e-8 if dtype == torch.float64 else 3e-7
    assert (out.mean - exact_mean).abs().max() < precision
    assert (rule.local(out, x).gain - gain).abs().max() < precision
    assert ((out.variance - exact).abs() <= 2e-3 * exact + precision).all()
    moderate = (mean.abs() < 4) & (variance > 1e-9)
    assert ((out.variance / exact - 1).abs() < 2e-3)[moderate].all()


def test_sigmoid_at_variance_zero():
    x = torch.linspace(-40, 40, 81)
    out = setting(aten.sigmoid.default).rule(Moments(x, 0.0))
    torch.testing.assert_close(out.mean, x.sigmoid(), rtol=1e-6, atol=0)
    assert (out.variance == 0).all()
    assert torch.equal(out.logits.moments.mean, x)
