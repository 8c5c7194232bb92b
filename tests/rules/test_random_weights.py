import pytest
import torch
import torch.nn.functional as F

from linear_part import PerSample, noise_covariance
from momentprop.moments import Moments, is_moments, mean_of
from properties import AnyRule, Samples, check_gradients, gaussian_samples
from rule_settings import C, Setting, X, positive
from rule_settings import setting as make

linear = torch.ops.momentprop.random_linear.default
convolution = torch.ops.momentprop.random_convolution.default


def P(*shape):
    return C(*shape, make=positive)


ONE = ([1], [0], [1], 1)
SETTINGS = [
    make(linear, X(2, 3), C(4, 3), P(4, 3), C(4), P(4)),
    make(linear, X(2, 3), C(4, 3), P(4, 3), None, None),
    make(linear, X(2, 3), C(4, 3), None, C(4), P(4)),
    make(linear, X(2, 3, 2), C(4, 2), P(4, 2), C(4), None),
    make(linear, X(1, 2, 3, 2), C(2, 2), P(2, 2), C(2), P(2)),
    make(convolution, X(2, 2, 5), C(3, 2, 2), P(3, 2, 2), C(3), P(3), *ONE),
    make(convolution, X(1, 4, 4, 5), C(2, 2, 2, 3), P(2, 2, 2, 3), None, None, [2, 1], [1, 0], [1, 2], 2),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestRandomWeights(AnyRule):
    def check_agrees_with_sampling(self, setting: Setting) -> None:
        """Weights drawn as normal numbers, anew for every sample."""
        x, weight, w_var, bias, b_var, *sizes = setting.arguments()
        n = 20_000

        def draw(mean, variance):
            if mean is None or variance is None:
                return mean if mean is None else mean.expand(n, *mean.shape)
            return gaussian_samples(Moments(mean, variance), n)

        def run(value, w, b):
            if setting.op is linear:
                return F.linear(value, w, b)
            stride, padding, dilation, groups = sizes
            convolve = F.conv1d if len(stride) == 1 else F.conv2d
            return convolve(value, w, b, stride, padding, dilation, groups)

        values, w, b = gaussian_samples(x, n), draw(weight, w_var), draw(bias, b_var)
        dims = (0, 0, None if b is None else 0)
        Samples(torch.vmap(run, in_dims=dims)(values, w, b)).assert_agrees(setting.rule(*setting.arguments()))

    def check_is_the_operator_where_variance_vanishes(self, setting: Setting) -> None:
        """With weights that do not vary either: the layer itself."""
        x, weight, _, bias, _, *sizes = setting.arguments()
        zero = torch.zeros_like(weight)
        out = setting.rule(Moments(x.mean, 0.0), weight, zero, bias, None, *sizes)
        torch.testing.assert_close(out.mean, setting.op(x.mean, weight, None, bias, None, *sizes))
        assert out.variance.max() < 1e-20

    def check_plain_tensors_run_the_operator(self, setting: Setting) -> None:
        """Not here: on a plain tensor the noise begins."""
        args = setting.arguments()
        plain = [mean_of(a) for a in args]
        out = setting.rule(*plain)
        assert is_moments(out)
        reference = setting.rule(Moments(plain[0], 0.0), *plain[1:])
        torch.testing.assert_close(out.variance, reference.variance)

    def test_gradients_are_right(self, setting: Setting) -> None:
        check_gradients(setting)

    def test_sources_add_up_to_the_covariance_of_a_sample(self, setting: Setting) -> None:
        """Of all outputs of a sample, for a certain input: by sampling."""
        x, *rest = [mean_of(a) for a in setting.arguments()]
        draws = torch.stack([setting.op(x, *rest) for _ in range(8000)]).flatten(2)
        out = setting.rule(x, *rest)
        part = setting.linear_part((x, *rest))
        size = out.mean[0].numel()
        rows = torch.eye(size, dtype=torch.float64).reshape(size, 1, *out.shape[1:]).expand(size, *out.shape)
        found = noise_covariance(part.linearization.noise, rows, PerSample())
        for b in range(out.shape[0]):
            expected = torch.cov(draws[:, b].T)
            scale = expected.diagonal().sqrt()
            assert ((found[b] - expected).abs() / (scale[:, None] * scale)).max() < 0.06


def test_random_weights_of_the_network_itself_are_refused():
    refuses = SETTINGS[0].rule.refuses
    assert refuses({}, frozenset({"input"})) is None
    assert "weight" in refuses({}, frozenset({"input", "weight"}))
