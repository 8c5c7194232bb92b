import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from properties import AnyRule, LinearRule, SampledRule, Samples, Setting, X, check_gradients, fixed, setting

from momentprop.moments import Moments

aten = torch.ops.aten
max_pool2d = setting(aten.max_pool2d.default).rule


def many(op, *args):
    return Setting(op, args, n_samples=50_000)


# Windows of at most two elements inside the input: exact.
PAIRS = [
    many(aten.max_pool1d.default, X(2, 2, 6), [2]),
    many(aten.max_pool1d.default, X(2, 5), [2], [1]),
    many(aten.max_pool1d.default, X(1, 1, 5), [2], [2], [1]),
    many(aten.max_pool1d.default, X(1, 1, 6), [2], [1], [0], [3]),
    many(aten.max_pool1d.default, X(1, 1, 5), [2], [2], [0], [1], True),
    many(aten.max_pool2d.default, X(1, 2, 3, 4), [1, 2]),
    many(aten.max_pool2d.default, X(2, 4, 3), [2, 1], [1, 2], [1, 0], [2, 1]),
    many(aten.max_pool2d.default, X(1, 1, 3, 3), [1, 1], [2]),
    many(aten.max_pool3d.default, X(1, 1, 2, 2, 4), [1, 1, 2], [1, 2, 1]),
]

WINDOWS = [
    setting(aten.max_pool1d.default, X(2, 2, 7), [3]),
    setting(aten.max_pool1d.default, X(2, 7), [3], [2], [1], [1], True),
    setting(aten.max_pool1d.default, X(1, 2, 9), [3], [2], [1], [2]),
    setting(aten.max_pool1d.default, X(1, 2, 8), 3, 2, 1),
    setting(aten.max_pool2d.default, X(2, 2, 4, 6), [2, 2]),
    setting(aten.max_pool2d.default, X(2, 2, 5, 5), 2),
    setting(aten.max_pool2d.default, X(2, 5, 5), [2, 2]),
    setting(aten.max_pool2d.default, X(1, 2, 5, 6), [3, 3], [2, 2], [1, 1]),
    setting(aten.max_pool2d.default, X(1, 2, 5, 6), 3, 2, 1, 1, True),
    setting(aten.max_pool2d.default, X(1, 2, 4, 4), [3, 2], [1, 3], [1, 0], [1, 2]),
    setting(aten.max_pool2d.default, X(1, 1, 6, 7), [3, 3], [3, 2], [1, 1], [1, 2], True),
    # without its last window, which would start in the padding
    setting(aten.max_pool2d.default, X(1, 1, 3, 5), [2, 2], [2, 2], [1, 1], [1, 1], True),
    setting(aten.max_pool3d.default, X(1, 2, 2, 4, 4), [2, 2, 2]),
    setting(aten.max_pool3d.default, X(2, 3, 4, 3), [2, 3, 2], [1, 2, 2], [1, 1, 0], [1, 1, 2]),
    setting(aten.max_pool3d.default, X(1, 1, 3, 4, 3), 2, 2, 0, 1, True),
]

AVERAGES = [
    setting(aten.avg_pool1d.default, X(2, 2, 6), [2]),
    setting(aten.avg_pool1d.default, X(2, 7), [3], [2], [1]),
    setting(aten.avg_pool1d.default, X(1, 2, 7), [3], [2], [1], True),
    setting(aten.avg_pool1d.default, X(1, 2, 7), [3], [2], [1], False, False),
    setting(aten.avg_pool1d.default, X(1, 2, 8), [3], [2], [1], True, False),
    setting(aten.avg_pool1d.default, X(1, 2, 8), [3], [], [0], True),
    setting(aten.avg_pool2d.default, X(1, 2, 4, 4), [2, 2]),
    setting(aten.avg_pool2d.default, X(2, 5, 4), [2, 3]),
    setting(aten.avg_pool2d.default, X(2, 4, 4), 2, 1, 1),
    setting(aten.avg_pool2d.default, X(1, 2, 5, 4), [3, 3], [2, 1], [1, 1]),
    setting(aten.avg_pool2d.default, X(1, 2, 5, 4), [3, 3], [2, 1], [1, 1], False, False),
    setting(aten.avg_pool2d.default, X(1, 2, 5, 6), [3, 2], [2, 3], [1, 1], True),
    setting(aten.avg_pool2d.default, X(1, 2, 5, 6), [3, 2], [2, 3], [1, 1], True, False),
    setting(aten.avg_pool2d.default, X(1, 1, 4, 4), [3, 3], [2, 2], [0, 0], True, True),
    setting(aten.avg_pool2d.default, X(1, 1, 4, 4), [2, 2], [2, 2], [1, 1], False, True, 3),
    setting(aten.avg_pool2d.default, X(1, 1, 5, 4), [2, 2], [2, 2], [0, 0], True, False, 5),
    setting(aten.avg_pool3d.default, X(1, 2, 2, 2, 4), [2, 2, 2]),
    setting(aten.avg_pool3d.default, X(1, 3, 3, 3), [2, 2, 2], [1, 1, 1], [1, 0, 1], False, False),
    setting(aten.avg_pool3d.default, X(1, 1, 3, 3, 4), 2, 2, 1, True, False),
    setting(aten.avg_pool3d.default, X(1, 1, 3, 3, 4), 2, 2, 0, True, True, 7),
    setting(aten.adaptive_avg_pool1d.default, X(2, 2, 6), [3]),
    setting(aten.adaptive_avg_pool1d.default, X(2, 7), [3]),
    setting(aten.adaptive_avg_pool1d.default, X(1, 1, 3), [5]),
    setting(aten.adaptive_avg_pool2d.default, X(1, 2, 4, 5), [1, 1]),
    setting(aten.adaptive_avg_pool2d.default, X(2, 5, 4), [3, 2]),
    setting(aten.adaptive_avg_pool2d.default, X(1, 1, 5, 7), [2, 3]),
    setting(aten.adaptive_avg_pool2d.default, X(1, 1, 3, 4), [5, 4]),
    setting(aten.adaptive_avg_pool3d.default, X(1, 1, 2, 3, 5), [1, 2, 3]),
    setting(aten.adaptive_avg_pool3d.default, X(1, 2, 2, 4), [2, 1, 2]),
]

SETTINGS = PAIRS + WINDOWS + AVERAGES


@pytest.mark.parametrize("setting", AVERAGES, ids=str)
class TestAveragePooling(LinearRule):
    pass


@pytest.mark.parametrize("setting", PAIRS, ids=str)
class TestMaxOfTwo(SampledRule):
    def test_gradients_are_right(self, setting: Setting) -> None:
        check_gradients(setting)

    def test_gradients_are_right_at_ties(self, setting: Setting) -> None:
        """There the plain maximum has a kink, its moments have none."""
        check_gradients(setting, fixed(mean=0.5))


@pytest.mark.parametrize("setting", WINDOWS, ids=str)
class TestMaxPooling(AnyRule):
    def test_clear_winner_passes_its_own_moments(self, setting: Setting) -> None:
        """Means a hundred standard deviations apart: the maximum is the element with the highest mean."""
        x, *rest = setting.arguments()
        order = torch.randperm(x.mean.numel()).reshape(x.shape).to(x.dtype)
        x = Moments(order * 100, x.variance.clamp_max(1))
        n = int(str(setting.op)[len("aten.max_pool")])
        pool = getattr(F, f"max_pool{n}d")
        mean, index = pool(x.mean, *[r or None for r in rest[:2]], *rest[2:], return_indices=True)
        out = setting.rule(x, *rest)
        assert torch.equal(out.mean, mean)
        assert torch.equal(out.variance, x.variance.flatten(-n).gather(-1, index.flatten(-n)).view_as(mean))

    def test_gradients_are_right(self, setting: Setting) -> None:
        check_gradients(setting)


def max_of_independent(x: Moments) -> Moments:
    """The moments of the maximum over the last dimension, by integrating the product of the CDFs."""
    reach = 9 * x.std.amax()
    low, high = x.mean.amin() - reach, x.mean.amax() + reach
    t = torch.linspace(0, 1, 4001, dtype=x.dtype)[:, None, None] * (high - low) + low
    cdf = torch.special.ndtr((t - x.mean) / x.std).prod(-1)
    below = high - t[..., 0]  # Y = high - max has E[Y] = int P(Y > y) dy and E[Y^2] = int 2 y P(Y > y) dy
    first, second = (torch.trapezoid(f, t[:, 0, 0], dim=0) for f in (cdf, 2 * below * cdf))
    return Moments(high - first, second - first**2)


def windows(n_elements: int, spread: float, variation: float, count: int = 300) -> Moments:
    """Means with the given standard deviation; variances exp(N(0, variation^2))."""
    mean, log_variance = torch.randn(2, count, n_elements, dtype=torch.float64)
    return Moments(mean * spread, (log_variance * variation).exp())


def test_integrated_maximum_agrees_with_sampling():
    x = windows(9, spread=1.0, variation=1.0, count=20)
    values = x.mean + x.std * torch.randn(100_000, *x.shape, dtype=torch.float64)
    Samples(F.max_pool2d(values.reshape(-1, 20, 3, 3), 3).flatten(1)).assert_agrees(max_of_independent(x))


@pytest.mark.parametrize(
    ("kernel", "variation", "mean_measured", "variance_measured"),
    [
        (2, 0.0, 0.0061, 0.057),
        (2, 0.5, 0.0380, 0.279),
        (2, 1.0, 0.1105, 0.439),
        (3, 0.0, 0.0158, 0.134),
        (3, 0.5, 0.0538, 0.448),
        (3, 1.0, 0.1431, 0.629),
    ],
)
def test_max_pooling_error_is_bounded(kernel, variation, mean_measured, variance_measured):
    """Folding takes maxima for Gaussian, which costs more the more the variances in a window differ.

    The error of the mean is bounded in standard deviations of the true maximum, that of the variance
    relative to it; over 1200 windows whose means spread by 0 to 3 standard deviations, and whose
    variances are exp(N(0, variation^2)).
    """
    worst_mean = worst_variance = 0.0
    for spread in (0.0, 0.3, 1.0, 3.0):
        x = windows(kernel**2, spread, variation)
        true = max_of_independent(x)
        image = Moments(*(v.reshape(-1, 1, kernel, kernel) for v in (x.mean, x.variance)))
        out = max_pool2d(image, [kernel, kernel])
        worst_mean = max(worst_mean, ((out.mean.flatten() - true.mean) / true.std).abs().max().item())
        worst_variance = max(worst_variance, (out.variance.flatten() / true.variance - 1).abs().max().item())
    assert worst_mean <= 1.5 * mean_measured
    assert worst_variance <= 1.5 * variance_measured


means = st.floats(-1e6, 1e6, width=32)
variances = st.one_of(st.just(0.0), st.floats(-30, 12).map(lambda x: 10**x))


@given(st.lists(st.tuples(means, variances), min_size=4, max_size=4))
def test_maximum_stays_above_every_mean(elements):
    for dtype in (torch.float32, torch.float64):
        mean, variance = torch.tensor(elements, dtype=dtype).T.reshape(2, 1, 2, 2)
        out = max_pool2d(Moments(mean, variance), [2, 2])
        assert out.mean.isfinite().all()
        assert out.mean >= mean.max()
        assert out.mean <= mean.max() + 4 * variance.sum().sqrt() + 1e-15
        assert 0 <= out.variance <= variance.sum() * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("variance", [1e-30, 1e-8, 1e-4, 1.0, 1e12])
def test_gradients_pass_padding(dtype, variance):
    """The padding's mean is near the lowest float: its distance in standard deviations overflows."""
    mean = torch.randn(1, 1, 4, 4, dtype=dtype, requires_grad=True)
    v = torch.full_like(mean, variance).requires_grad_()
    out = max_pool2d(Moments(mean, v), [3, 3], [2, 2], [1, 1])
    for gradient in torch.autograd.grad(out.mean.sum() + out.variance.sum(), [mean, v]):
        assert gradient.isfinite().all()
