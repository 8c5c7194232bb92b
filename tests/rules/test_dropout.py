import pytest
import torch

from linear_part import PerSample, linear_part, noise_covariance
from momentprop.moments import Moments
from momentprop.rules.facts import neighbours_of
from properties import AnyRule, Samples, check_gradients, gaussian_samples
from rule_settings import Setting, X, setting

aten = torch.ops.aten

OPERATORS = [
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
]
CHANNELS = (aten.feature_dropout.default, aten.feature_alpha_dropout.default)
SETTINGS = [
    setting(op, x, p, True)
    for op, x in [
        (aten.dropout.default, X(5)),
        (aten.dropout.default, X(2, 3)),
        (aten.feature_dropout.default, X(2, 3)),
        (aten.feature_dropout.default, X(2, 2, 3)),
        (aten.feature_dropout.default, X(2, 2, 2, 2)),
        (aten.alpha_dropout.default, X(5)),
        (aten.alpha_dropout.default, X(2, 3)),
        (aten.feature_alpha_dropout.default, X(2, 3)),
        (aten.feature_alpha_dropout.default, X(2, 2, 3)),
    ]
    for p in (0.005, 0.1, 0.5, 0.9)
]


def drawn(setting: Setting, values: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """The operator at values stacked in front: all of them are one batch."""
    rows = values.reshape(-1, *values.shape[2:]) if values.dim() > 2 else values
    return setting.op(rows.contiguous(), p, train).reshape(values.shape)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestDropout(AnyRule):
    def check_agrees_with_sampling(self, setting: Setting) -> None:
        """Masks are drawn by the operator, over samples stacked in front of the batch."""
        (x, p, train) = setting.arguments()
        draws = drawn(setting, gaussian_samples(x, 100_000), p, train)
        Samples(draws).assert_agrees(setting.rule(x, p, train))

    def check_is_the_operator_where_variance_vanishes(self, setting: Setting) -> None:
        """The operator's own noise remains: one of two values, with probabilities p and 1 - p."""
        (x, p, train) = setting.arguments()
        draws = drawn(setting, x.mean.expand(5000, *x.shape), p, train)
        low, high = draws.amin(0), draws.amax(0)
        for variance in (0.0, 1e-24):
            out = setting.rule(Moments(x.mean, variance), p, train)
            torch.testing.assert_close(out.variance, p * (1 - p) * (high - low) ** 2, rtol=1e-9, atol=1e-20)
            share = (out.mean - low) / (high - low)
            assert torch.minimum((share - p).abs(), (share - 1 + p).abs()).max() < 1e-9

    def check_plain_tensors_run_the_operator(self, setting: Setting) -> None:
        """Not here: on a plain tensor the noise begins."""
        (x, p, train) = setting.arguments()
        out = setting.rule(x.mean, p, train)
        reference = setting.rule(Moments(x.mean, 0.0), p, train)
        assert torch.equal(out.mean, reference.mean)
        torch.testing.assert_close(out.variance, reference.variance)

    def test_gradients_are_right(self, setting: Setting) -> None:
        check_gradients(setting)


@pytest.mark.parametrize("op", OPERATORS, ids=str)
@pytest.mark.parametrize(("p", "train"), [(0.5, False), (0.0, True), (0.0, False)])
def test_switched_off_is_the_identity(op, p, train):
    rule = setting(op).rule
    tensor = torch.randn(2, 3)
    assert torch.equal(rule(tensor, p, train), tensor)
    moments = Moments(tensor, 0.5)
    out = rule(moments, p, train)
    assert torch.equal(out.mean, tensor)
    assert torch.equal(out.variance, moments.variance)


@pytest.mark.parametrize("op", CHANNELS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.6])
def test_elements_of_a_channel_share_their_mask(op, p):
    """Covariance within a channel, as told to neighbours and as the sweep back adds it up, by sampling."""
    x = torch.randn(1, 2, 3, dtype=torch.float64)
    rule = setting(op).rule
    out = rule(x, p, True)
    draws = op(x.expand(200_000, 2, 3).contiguous(), p, True).flatten(1)
    covariance = torch.cov(draws.T)
    told = neighbours_of(out)([0], [1], [2], [1])  # Cov(x_i, x_{i+1}), i = 0, 1
    for channel in range(2):
        for i in range(2):
            expected = covariance[3 * channel + i, 3 * channel + i + 1]
            torch.testing.assert_close(told[0, channel, i], expected, rtol=0.05, atol=0.02)
    rows = torch.eye(6, dtype=torch.float64).reshape(6, 1, 2, 3)
    part = linear_part(rule, x, p, True)
    [found] = noise_covariance(part.linearization.noise, rows, PerSample())
    torch.testing.assert_close(found, covariance, rtol=0.05, atol=0.02)
    torch.testing.assert_close(found.diagonal(), out.variance.flatten())


def test_alpha_dropout_keeps_mean_0_and_variance_1():
    out = setting(aten.alpha_dropout.default).rule(Moments(torch.zeros(3), 1.0), 0.3, True)
    torch.testing.assert_close(out.mean, torch.zeros(3))
    torch.testing.assert_close(out.variance, torch.ones(3))


@pytest.mark.parametrize("op", OPERATORS, ids=str)
def test_dropouts_create_noise(op):
    assert setting(op).rule.role.creates_noise
    assert not setting(aten.relu.default).rule.role.creates_noise
    case = setting(op, X(2, 3), 0.5, True)
    assert case.linear_part(case.arguments()).linearization.noise
