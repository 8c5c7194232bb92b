import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import momentprop as mp
from linear_part import linear_part
from momentprop.moments import Moments, is_moments
from momentprop.rules.registry import RULES
from properties import AnyRule, SampledRule, Samples, check_gradients, gaussian_samples
from rule_settings import C, Setting, X, fixed, moderate, reason_of, setting

aten = torch.ops.aten

EXACT = [
    Setting(op, args, kwargs, n_samples=100_000)
    for op, args, kwargs in [
        (aten.relu.default, (X(),), {}),
        (aten.relu.default, (X(20),), {}),
        (aten.relu.default, (X(2, 3, 2, 2),), {}),
        (aten.leaky_relu.default, (X(20),), {}),
        (aten.leaky_relu.default, (X(20), 0.3), {}),
        (aten.leaky_relu.default, (X(20), -0.3), {}),
        (aten.prelu.default, (X(20), C(1)), {}),
        (aten.prelu.default, (X(2, 3, 2, 2), C(3)), {}),
        (aten.prelu.default, (X(5, 3), C(3)), {}),
        (aten.abs.default, (X(20),), {}),
        (aten.relu6.default, (X(20),), {}),
        (aten.hardtanh.default, (X(20),), {}),
        (aten.hardtanh.default, (X(20), -0.1, 2), {}),
        (aten.softshrink.default, (X(20),), {}),
        (aten.softshrink.default, (X(20), 1.5), {}),
        (aten.hardshrink.default, (X(20),), {}),
        (aten.threshold.default, (X(20), 0.3, -2.0), {}),
        (aten.clamp.default, (X(20), -0.5, 0.5), {}),
        (aten.clamp.default, (X(20), None, 0.5), {}),
        (aten.clamp.default, (X(20), -1), {}),
        (aten.clamp.Tensor, (X(2, 3), C(3), None), {}),
        (aten.clamp_min.default, (X(20), 0.2), {}),
        (aten.clamp_min.Tensor, (X(2, 3), C(3)), {}),
        (aten.clamp_max.default, (X(20), 0.2), {}),
        (aten.clamp_max.Tensor, (X(2, 3), C(3)), {}),
        (aten.sin.default, (X(20),), {}),
        (aten.cos.default, (X(20),), {}),
        (aten.square.default, (X(20),), {}),
        (aten.pow.Tensor_Scalar, (X(20), 2), {}),
        (aten.erf.default, (X(20),), {}),
    ]
]
SMOOTH = [
    Setting(aten.sigmoid.default, (X(),)),
    Setting(aten.sigmoid.default, (X(20),)),
    Setting(aten.tanh.default, (X(20),)),
    Setting(aten.gelu.default, (X(20),)),
    Setting(aten.gelu.default, (X(20),), {"approximate": "tanh"}),
    Setting(aten.silu.default, (X(2, 3),)),
    Setting(aten.hardsigmoid.default, (X(20),)),
    Setting(aten.mish.default, (X(20),)),
    Setting(aten.softplus.default, (X(20),)),
    Setting(aten.softplus.default, (X(20), 2, 30)),
    Setting(aten.log_sigmoid.default, (X(20),)),
    Setting(aten.elu.default, (X(20),)),
    Setting(aten.elu.default, (X(20), 0.7)),
    Setting(aten.celu.default, (X(20), 2.0)),
    Setting(aten.selu.default, (X(20),)),
    Setting(aten.hardswish.default, (X(20),)),
    Setting(aten.atan.default, (X(20),)),
    Setting(aten.exp.default, (X(20),)),
    Setting(aten.expm1.default, (X(20),)),
]


def of_positive(args):
    """Means away from zero and above, as the operator needs them."""
    return tuple(Moments(a.mean.abs() + 0.5, a.variance) if is_moments(a) else a for a in args)


class Positive(Setting):
    def arguments(self, dtype=torch.float64, draw=moderate, seed=0):
        return of_positive(super().arguments(dtype, draw, seed))


POSITIVE = [
    Positive(aten.log.default, (X(20),)),
    Positive(aten.log1p.default, (X(20),)),
    Positive(aten.sqrt.default, (X(20),)),
    Positive(aten.rsqrt.default, (X(20),)),
    Positive(aten.reciprocal.default, (X(20),)),
    Positive(aten.pow.Tensor_Scalar, (X(20), 0.5)),
    Positive(aten.pow.Tensor_Scalar, (X(20), 1.5)),
    Positive(aten.pow.Tensor_Scalar, (X(20), -2)),
]


@pytest.mark.parametrize("setting", EXACT, ids=str)
class TestExact(SampledRule):
    pass


@pytest.mark.parametrize("setting", SMOOTH, ids=str)
class TestSmooth(AnyRule):
    pass


@pytest.mark.parametrize("setting", POSITIVE, ids=str)
class TestPositive(AnyRule):
    def check_agrees_with_sampling(self, setting):
        """Of a log-normal input with these moments."""
        (x, *rest) = setting.arguments()
        x = Moments(x.mean, x.variance.clamp_max(0.1))
        offset = 1 if setting.op is aten.log1p.default else 0  # it is 1 + X that is log-normal
        s2 = torch.log1p(x.variance / (x.mean + offset) ** 2)
        normal = gaussian_samples(Moments(torch.log(x.mean + offset) - s2 / 2, s2), 50_000)
        inputs = torch.exp(normal) - offset
        values = setting.op(inputs, *rest)
        out = setting.rule(x, *rest)
        Samples(values).assert_agrees(out)
        covariance = ((values - values.mean(0)) * (inputs - x.mean)).mean(0)
        gain = setting.linear_part((x, *rest)).gain
        torch.testing.assert_close(gain, covariance / x.variance, rtol=0.05, atol=0)


MEANS = torch.linspace(-6, 6, 49, dtype=torch.float64)[:, None]
STDS = torch.tensor([1e-6, 1e-4, 1e-2, 0.1, 0.34, 0.35, 0.69, 0.7, 1, 2, 3, 10], dtype=torch.float64)


def normal_points(n):
    """Points and weights of the trapezoidal rule over 12 standard deviations, for averages."""
    z = torch.linspace(-12, 12, n, dtype=torch.float64)
    return z, torch.exp(-z * z / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)  # 0 at the ends but for rounding


def integrated(f, n_points):
    """Mean, variance and gain of f, [means, stds]."""
    z, weight = normal_points(n_points)
    center = f(MEANS)
    deviation = f(MEANS[..., None] + STDS[:, None] * z) - center[..., None]
    shift, slope = (deviation @ torch.stack([weight, weight * z], 1)).unbind(-1)
    variance = deviation.sub_(shift[..., None]).square_() @ weight
    return center + shift, variance, slope / STDS


def stated_bounds(exactness: str) -> torch.Tensor:
    """One for each of STDS, as in "to 0.2 % for s <= 1, 1 % for s <= 3"; elsewhere that of an exact rule."""
    bounds = torch.full_like(STDS, 1e-5)
    for percent, limit in reversed(re.findall(r"([\d.]+) % for s <= ([\d.]+)", exactness)):
        bounds = torch.where(float(limit) >= STDS, float(percent) / 100, bounds)
    return bounds


LISTED = [s for s in EXACT + SMOOTH if not any(isinstance(a, C) for a in s.args)]
GROWING = (aten.exp.default, aten.expm1.default)


@pytest.mark.parametrize("setting", LISTED, ids=str)
def test_stated_bounds(setting):
    """The errors of mean and std relative to the largest std over all means, that of the gain absolutely."""
    has_kinks = setting in EXACT or setting.op is aten.hardsigmoid.default
    mean, variance, gain = integrated(
        lambda x: setting.op(x, *setting.args[1:], **setting.kwargs), 12_001 if has_kinks else 3001
    )
    scale = variance.sqrt().amax(0)
    jumps = setting.op in (aten.hardshrink.default, aten.threshold.default)
    kinked = setting.op in (aten.elu.default, aten.selu.default, aten.hardswish.default)
    kept = STDS <= 3 if setting.op in GROWING else STDS <= 10
    off_jump = ((MEANS.abs() - 0.5).abs() > 1e-3) & ((MEANS - 0.3).abs() > 1e-3) if jumps else MEANS < 99
    stated = stated_bounds(setting.rule.exactness) + 2e-3 * jumps  # the integral's own error there
    bounds = {
        torch.float32: torch.where(STDS < 0.01, math.inf, stated + 1e-4),  # rounding; smaller ones below
        torch.float64: torch.where(STDS < 1e-5, math.inf, stated) if kinked else stated,
    }
    for dtype, bound in bounds.items():
        x = Moments(MEANS.expand_as(mean).to(dtype), STDS.square().expand_as(mean).to(dtype))
        out = setting.rule(x, *setting.args[1:], **setting.kwargs)
        part = setting.linear_part((x, *setting.args[1:]))
        most = torch.finfo(dtype).eps * 8 * mean.abs().amax(0)
        mean_error, std_error = (out.mean - mean).abs(), (out.std - variance.sqrt()).abs()
        gain_error = (part.gain - gain).abs() / gain.abs().amax(0).clamp_min(1)
        assert (mean_error <= bound * scale + most)[off_jump & kept].all(), dtype
        assert (std_error <= bound * scale)[off_jump & kept].all(), dtype
        assert (gain_error <= bound)[off_jump & kept & (STDS > 1e-2)].all(), dtype


@pytest.mark.parametrize("op", [aten.gelu.default, aten.silu.default, aten.tanh.default], ids=str)
def test_small_std_in_float32(op):
    """Down to where the points of a quadrature are the same number, std is f' times that of the input."""
    mean = torch.linspace(-3, 3, 31)
    slope = torch.func.vmap(torch.func.grad(op))(mean.double())
    for std in (1e-12, 1e-8, 1e-6, 1e-4, 1e-3):
        out = setting(op).rule(Moments(mean, std**2))
        torch.testing.assert_close(out.mean, op(mean), rtol=1e-6, atol=1e-6)
        assert ((out.std / std - slope.abs()).abs() < 1e-4).all()


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 5, 8])
def test_whole_powers_are_exact(exponent):
    mean = torch.linspace(-2, 2, 21, dtype=torch.float64)
    x = Moments(mean, 0.3)
    rule = setting(aten.pow.Tensor_Scalar).rule
    out = rule(x, exponent)
    order = torch.arange(2 * exponent + 1)
    moments = torch.zeros(len(order), len(mean), dtype=torch.float64)  # E[X^n], by their recursion
    for n in order.tolist():
        before = [moments[n - 1] if n else 0 * mean, moments[n - 2] if n > 1 else 0 * mean]
        moments[n] = mean * before[0] + (n - 1) * 0.3 * before[1] if n else 1.0
    torch.testing.assert_close(out.mean, moments[exponent], rtol=1e-11, atol=1e-11)
    variance = moments[2 * exponent] - moments[exponent] ** 2
    torch.testing.assert_close(out.variance, variance, rtol=1e-9, atol=1e-9)
    slope = exponent * moments[exponent - 1] if exponent else 0 * mean
    torch.testing.assert_close(linear_part(rule, x, exponent).gain, slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", POSITIVE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_should_be_positive_may_be_anything(case, dtype):
    mean = torch.tensor([-1e6, -1.0, -1e-20, 0.0, 1e-30, 1e-20, 1e-6, 1.0, 1e6], dtype=dtype)[:, None]
    variance = torch.tensor([0.0, 1e-30, 1e-10, 1.0, 1e12], dtype=dtype).expand(9, 5)
    leaves = [mean.expand(9, 5).clone().requires_grad_(), variance.clone().requires_grad_()]
    x = Moments(*leaves)
    out = case.rule(x, *case.args[1:])
    part = case.linear_part((x, *case.args[1:]))
    values = (out.mean, out.variance, part.gain, part.noise)
    assert all(v.isfinite().all() for v in values[: 4 if case.args[1:] != (-2,) else 1])
    assert (out.variance >= 0).all()
    gradients = torch.autograd.grad((out.mean.clamp(-1e6, 1e6)).sum(), leaves)
    assert all(not g.isnan().any() for g in gradients)


def test_reciprocal_of_what_is_negative():
    rule = setting(aten.reciprocal.default).rule
    x, y = Moments(torch.tensor([2.0]), 0.1), Moments(torch.tensor([-2.0]), 0.1)
    out, mirrored = rule(x), rule(y)
    assert torch.equal(out.mean, -mirrored.mean)
    assert torch.equal(out.variance, mirrored.variance)
    assert torch.equal(linear_part(rule, x).gain, linear_part(rule, y).gain)


@pytest.mark.parametrize("std", [1e-3, 1.0, 1e3])
def test_relu_agrees_with_sampling_around_its_kink(std):
    a = torch.linspace(-3, 6, 31, dtype=torch.float64)
    x = Moments(a * std, std**2)
    values = gaussian_samples(x.to(torch.float32), 200_000).relu()
    Samples(values).assert_agrees(setting(aten.relu.default).rule(x))


@pytest.mark.parametrize("mean", [None, 0.0], ids=["moderate", "E=0"])
@pytest.mark.parametrize(
    "case",
    [
        setting(aten.relu.default, X(10)),
        setting(aten.leaky_relu.default, X(10), 0.2),
        setting(aten.hardtanh.default, X(10)),
        setting(aten.gelu.default, X(10)),
        setting(aten.tanh.default, X(10)),
        setting(aten.exp.default, X(10)),
        Positive(aten.rsqrt.default, (X(10),)),
    ],
    ids=str,
)
def test_gradients_are_right(case, mean):
    """At mean 0 in particular: there the plain ReLU has a kink, its moments have none."""
    check_gradients(case, fixed(mean=mean))


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


def test_sigmoid_agrees_with_integration():
    """Mean, variance and gain, by the trapezoidal rule over 12 standard deviations, in float64."""
    mean = torch.tensor([-30.0, -8, -3, -1, -0.2, 0, 0.5, 2, 6, 20], dtype=torch.float64)[:, None]
    variance = 10 ** torch.linspace(-10, 5, 46, dtype=torch.float64)
    variance = torch.cat([variance, torch.tensor([0.479, 0.481], dtype=torch.float64)])
    z, weight = normal_points(12_001)
    p = torch.sigmoid(mean[..., None] + variance.sqrt()[:, None] * z)
    exact_mean = p @ weight
    exact = (p - exact_mean[..., None]).square() @ weight
    gain = (p * (1 - p)) @ weight
    rule = setting(aten.sigmoid.default).rule
    for dtype, precision in ((torch.float32, 3e-7), (torch.float64, 2e-8)):
        x = Moments(mean.expand_as(exact).to(dtype), variance.expand_as(exact).to(dtype))
        out = rule(x)
        assert (out.mean - exact_mean).abs().max() < precision, dtype
        small = 0 if dtype == torch.float64 else 1e-5  # differences over points as close as rounding allows
        assert ((linear_part(rule, x).gain - gain).abs() < precision + small).all(), dtype
        assert ((out.variance - exact).abs() <= 1e-4 * exact + precision).all(), dtype


def test_sigmoid_at_variance_zero():
    x = torch.linspace(-40, 40, 81)
    out = setting(aten.sigmoid.default).rule(Moments(x, 0.0))
    torch.testing.assert_close(out.mean, x.sigmoid(), rtol=1e-6, atol=0)
    assert (out.variance == 0).all()
    assert torch.equal(out.logits.moments.mean, x)


def test_other_arguments_must_be_constant():
    assert "weight is random" in reason_of(setting(aten.prelu.default, X(2, 3), C(3)), "self", "weight")
    assert "min is random" in reason_of(setting(aten.clamp.Tensor, X(2, 3), C(3)), "self", "min")


class Activated(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x):
        return self.op(x)


@pytest.fixture(scope="module")
def own():
    """An operator of one's own: a sine with a frequency."""

    @torch.library.custom_op("tests::wave", mutates_args=())
    def wave(x: torch.Tensor, frequency: float = 1.0) -> torch.Tensor:
        return torch.sin(frequency * x)

    wave.register_fake(lambda x, frequency=1.0: torch.empty_like(x))
    op = torch.ops.tests.wave.default
    mp.activation(op)
    yield op
    RULES.remove(op)


@pytest.mark.parametrize("fidelity", ["paper", "accurate"])
def test_an_activation_of_ones_own(own, fidelity):
    """In one line; compared with the rule for sine."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 16), nn.Linear(16, 2)
    x = torch.randn(4, 8)

    def converted(op):
        model = nn.Sequential(first, nn.Dropout(0.5), nn.Linear(16, 16), Activated(op), last)
        model[2].load_state_dict(hidden.state_dict())
        return mp.convert(model.eval(), x, fidelity)(x)

    hidden = nn.Linear(16, 16)
    mine, theirs = converted(lambda t: own(t, 1.0)), converted(torch.sin)
    torch.testing.assert_close(mine.mean, theirs.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine.variance, theirs.variance, rtol=1e-4, atol=1e-6)


def test_a_rule_is_not_replaced_by_accident(own):
    with pytest.raises(mp.RuleError, match="already has a rule"):
        mp.activation(own)
    mp.activation(own, override=True)


@pytest.mark.parametrize(
    "activation",
    [nn.GELU("tanh"), nn.LeakyReLU(0.3), nn.Hardtanh(-0.2, 0.3), nn.PReLU(), nn.Tanh(), nn.SiLU()],
    ids=str,
)
def test_activations_in_a_network_against_sampling(activation):
    """With their further arguments, where each unit is conditioned on its inputs (jump.py) too."""
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 32), activation, nn.Dropout(0.2), nn.Linear(32, 2))
    out = mp.convert(model.eval(), x, "accurate")(x).detach()
    sampled = mp.monte_carlo(model, x, n_samples=4000)
    assert ((out.std / sampled.std - 1).abs() < 0.08).all()
    assert ((out.mean - sampled.mean).abs() < 0.1 * sampled.std).all()
