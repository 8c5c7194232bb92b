import pytest
import torch
from properties import AnyRule, Samples, Setting, X, check_gradients, gaussian_samples, setting

from momentprop.moments import Moments

aten = torch.ops.aten

SETTINGS = [
    setting(op, x, p, True)
    for op, x in [
        (aten.dropout.default, X(5)),
        (aten.dropout.default, X(2, 3)),
        (aten.feature_dropout.default, X(2, 3)),
        (aten.feature_dropout.default, X(2, 2, 3)),
        (aten.feature_dropout.default, X(2, 2, 2, 2)),
    ]
    for p in (0.005, 0.1, 0.5, 0.9)
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestDropout(AnyRule):
    def test_agrees_with_sampling(self, setting: Setting) -> None:
        """Masks are drawn by the operator, over samples stacked in front of the batch."""
        (x, p, train) = setting.arguments()
        n = 100_000
        values = gaussian_samples(x, n)
        rows = values.reshape(-1, *x.shape[1:]) if x.mean.dim() > 1 else values
        Samples(setting.op(rows, p, train).reshape(values.shape)).assert_agrees(setting.rule(x, p, train))

    def test_is_the_operator_where_variance_vanishes(self, setting: Setting) -> None:
        """The operator's own noise remains: p / (1 - p) E^2."""
        (x, p, train) = setting.arguments()
        for variance in (0.0, 1e-24):
            out = setting.rule(Moments(x.mean, variance), p, train)
            assert torch.equal(out.mean, x.mean)
            torch.testing.assert_close(out.variance, p / (1 - p) * x.mean**2, rtol=1e-9, atol=1e-20)

    def test_plain_tensors_run_the_operator(self, setting: Setting) -> None:
        """Not here: on a plain tensor the noise begins."""
        (x, p, train) = setting.arguments()
        out = setting.rule(x.mean, p, train)
        reference = setting.rule(Moments(x.mean, 0.0), p, train)
        assert torch.equal(out.mean, reference.mean)
        torch.testing.assert_close(out.variance, reference.variance)

    def test_gradients_are_right(self, setting: Setting) -> None:
        check_gradients(setting)


@pytest.mark.parametrize("op", [aten.dropout.default, aten.feature_dropout.default], ids=str)
@pytest.mark.parametrize(("p", "train"), [(0.5, False), (0.0, True), (0.0, False)])
def test_switched_off_is_the_identity(op, p, train):
    rule = setting(op).rule
    tensor = torch.randn(2, 3)
    assert torch.equal(rule(tensor, p, train), tensor)
    moments = Moments(tensor, 0.5)
    out = rule(moments, p, train)
    assert torch.equal(out.mean, tensor)
    assert torch.equal(out.variance, moments.variance)


def test_only_dropout_creates_noise():
    assert setting(aten.dropout.default).rule.creates_noise
    assert setting(aten.feature_dropout.default).rule.creates_noise
    assert not setting(aten.relu.default).rule.creates_noise
