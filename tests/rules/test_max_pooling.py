import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from linear_part import linear_part, unit_rows
from momentprop.gaussian.normal import contrasted_max_moments
from momentprop.moments import Moments, plain
from momentprop.rules.facts import Contrast
from properties import AnyRule, SampledRule, Samples, check_gradients, gaussian_samples
from rule_settings import Setting, X, fixed

aten = torch.ops.aten
max_pool2d = Setting(aten.max_pool2d.default, ()).rule


def few(op, *args, fidelity="accurate"):
    return Setting(op, args, fidelity=fidelity)


def many(op, *args, fidelity="accurate"):
    return Setting(op, args, fidelity=fidelity, n_samples=50_000)


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
    many(aten.max_pool1d.default, X(2, 2, 6), [2], fidelity="fast"),
    many(aten.max_pool2d.default, X(1, 2, 3, 4), [1, 2], fidelity="fast"),
    many(aten.max_pool3d.default, X(1, 1, 2, 2, 4), [1, 1, 2], [1, 2, 1], fidelity="fast"),
    many(aten.max_pool1d.default, X(1, 1, 5), [2], [2], [1], fidelity="paper"),
    many(aten.max_pool2d.default, X(2, 4, 3), [2, 1], [1, 2], [1, 0], [2, 1], fidelity="paper"),
    many(aten.max_pool3d.default, X(1, 1, 2, 2, 4), [1, 1, 2], [1, 2, 1], fidelity="paper"),
]

WINDOWS = [
    few(aten.max_pool1d.default, X(2, 2, 7), [3]),
    few(aten.max_pool1d.default, X(2, 7), [3], [2], [1], [1], True),
    few(aten.max_pool1d.default, X(1, 2, 9), [3], [2], [1], [2]),
    few(aten.max_pool1d.default, X(1, 2, 8), 3, 2, 1),
    few(aten.max_pool2d.default, X(2, 2, 4, 6), [2, 2]),
    few(aten.max_pool2d.default, X(2, 2, 5, 5), 2),
    few(aten.max_pool2d.default, X(2, 5, 5), [2, 2]),
    few(aten.max_pool2d.default, X(1, 2, 5, 6), [3, 3], [2, 2], [1, 1]),
    few(aten.max_pool2d.default, X(1, 2, 5, 6), 3, 2, 1, 1, True),
    few(aten.max_pool2d.default, X(1, 2, 4, 4), [3, 2], [1, 3], [1, 0], [1, 2]),
    few(aten.max_pool2d.default, X(1, 1, 6, 7), [3, 3], [3, 2], [1, 1], [1, 2], True),
    # without its last window, which would start in the padding
    few(aten.max_pool2d.default, X(1, 1, 3, 5), [2, 2], [2, 2], [1, 1], [1, 1], True),
    few(aten.max_pool3d.default, X(1, 2, 2, 4, 4), [2, 2, 2]),
    few(aten.max_pool3d.default, X(2, 3, 4, 3), [2, 3, 2], [1, 2, 2], [1, 1, 0], [1, 1, 2]),
    few(aten.max_pool3d.default, X(1, 1, 3, 4, 3), 2, 2, 0, 1, True),
    few(aten.max_pool1d.default, X(2, 7), [3], [2], [1], [1], True, fidelity="paper"),
    few(aten.max_pool2d.default, X(2, 2, 5, 5), 2, fidelity="paper"),
    few(aten.max_pool2d.default, X(1, 1, 6, 7), [3, 3], [3, 2], [1, 1], [1, 2], True, fidelity="paper"),
    few(aten.max_pool3d.default, X(2, 3, 4, 3), [2, 3, 2], [1, 2, 2], [1, 1, 0], [1, 1, 2], fidelity="paper"),
]

SETTINGS = PAIRS + WINDOWS


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
    t = torch.linspace(0, 1, 1001, dtype=x.dtype)[:, None, None] * (high - low) + low
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
    values = gaussian_samples(x.to(torch.float32), 100_000)
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


def convolved(x: Moments, weight: torch.Tensor, fidelity: str, *settings) -> Moments:
    """The output of a convolution of independent Gaussians, which knows what its neighbours share."""
    n = weight.dim() - 2
    return Setting(getattr(aten, f"conv{n}d").default, (), fidelity=fidelity).rule(x, weight, None, *settings)


def smoothing(n: int, channels: int, size: int) -> torch.Tensor:
    """Weights of one sign, as of a learned blur: neighbours are alike."""
    return torch.rand(channels, 2, *[size] * n, dtype=torch.float64)


def image(n: int, size: int, batch: int = 1) -> Moments:
    mean, variance = torch.randn(2, batch, 2, *[size] * n, dtype=torch.float64)
    return Moments(mean, variance.exp())


def sampled_maxima(x: Moments, weight: torch.Tensor, settings, pool, count: int = 100_000) -> Samples:
    """Of the pooled convolution, for one image, in float32."""
    n, weight = weight.dim() - 2, weight.float()
    convolve = getattr(F, f"conv{n}d")
    parts = []
    for _ in range(count // 5000):
        images = x.mean + x.std * torch.randn(5000, *x.shape[1:], dtype=x.dtype)
        parts.append(pool(convolve(images.float(), weight, None, *settings)))
    return Samples(torch.cat(parts)[:, None])


@pytest.mark.parametrize(
    ("n", "window", "settings"),
    [
        (1, ([2],), ()),
        (1, ([2],), ([2],)),
        (1, ([2], [1], [0], [2]), ([1], [2], [2])),
        (2, ([1, 2],), ()),
        (2, ([2, 1],), ([1, 1], [1, 1])),
        (2, ([1, 2],), ([1, 1], [0, 0], [1, 1], 2)),
        (3, ([1, 2, 1],), ()),
    ],
    ids=str,
)
def test_windows_of_two_correlated_elements_are_exact(n, window, settings):
    """Two Gaussians with the covariance that the convolution tells: within 5 standard errors of sampling."""
    groups = settings[3] if len(settings) == 4 else 1
    x, weight = image(n, 7 if n < 3 else 4), smoothing(n, 2, 3)[:, : 2 // groups]
    pool = Setting(getattr(aten, f"max_pool{n}d").default, (), fidelity="accurate")
    samples = sampled_maxima(x, weight, settings, lambda z: pool.op(z, *window))
    samples.assert_agrees(pool.rule(convolved(x, weight, "accurate", *settings), *window))
    alone = pool.rule(plain(convolved(x, weight, "accurate", *settings)), *window)
    with pytest.raises(AssertionError, match=r"mean|variance"):  # covariance matters here
        samples.assert_agrees(alone)


@pytest.mark.parametrize(
    ("n", "window", "stride", "of_mean", "of_std"),
    [
        (1, [3], [3], 0.020, 0.054),
        (2, [2, 2], [2, 2], 0.021, 0.039),
        (2, [3, 3], [2, 2], 0.047, 0.116),
        (3, [2, 2, 2], [2, 2, 2], 0.019, 0.094),
    ],
    ids=str,
)
def test_told_covariance_is_closer_to_sampling(n, window, stride, of_mean, of_std):
    """Measured: what it leaves of the errors of mean and standard deviation, as medians over all windows."""
    x, weight = image(n, 8 if n < 3 else 6), smoothing(n, 3, 3)
    pool = Setting(getattr(aten, f"max_pool{n}d").default, (), fidelity="accurate")
    samples = sampled_maxima(x, weight, (), lambda z: pool.op(z, window, stride), count=40_000)
    told = pool.rule(convolved(x, weight, "accurate"), window, stride)
    alone = pool.rule(plain(convolved(x, weight, "accurate")), window, stride)
    std = samples.variance.sqrt()
    with_it, without = (((out.mean - samples.mean) / std).abs().median() for out in (told, alone))
    assert with_it <= 1.5 * of_mean * without
    with_it, without = ((out.std / std - 1).abs().median() for out in (told, alone))
    assert with_it <= 1.5 * of_std * without


def test_tier_paper_takes_the_elements_of_a_window_for_independent():
    x, weight = image(2, 6), smoothing(2, 3, 3)
    by_tier = {
        t: Setting(aten.max_pool2d.default, (), fidelity=t).rule for t in ("paper", "fast", "accurate")
    }
    out = {t: pool(convolved(x, weight, t), [2, 2]) for t, pool in by_tier.items()}
    alone = by_tier["accurate"](plain(convolved(x, weight, "accurate")), [2, 2])
    torch.testing.assert_close(out["paper"].mean, alone.mean)
    torch.testing.assert_close(out["paper"].variance, alone.variance)
    for tier in ("fast", "accurate"):
        assert (out[tier].mean < out["paper"].mean).all()  # what is alike has a lower maximum


@pytest.mark.parametrize(
    ("n", "window", "settings"),
    [
        (1, [2], ()),
        (1, [2], ([2], [0], [1])),
        (1, [2], ([1], [0], [2])),
        (2, [2, 1], ()),
        (2, [1, 2], ([1, 1], [0, 0], [1, 1], 2)),
        (3, [1, 2, 1], ()),
    ],
    ids=str,
)
def test_tier_fast_is_tier_accurate_for_pairs_whose_variance_is_the_same_all_over_a_channel(
    n, window, settings
):
    groups = settings[3] if len(settings) == 4 else 1
    x, weight = image(n, 8, batch=3), torch.randn(4, 2 // groups, *[3] * n, dtype=torch.float64)
    spread = torch.rand(3, 2, *[1] * n, dtype=torch.float64)
    x = Moments(x.mean, spread)
    out = {}
    for tier in ("fast", "accurate"):
        rule = Setting(getattr(aten, f"max_pool{n}d").default, (), fidelity=tier).rule
        out[tier] = rule(convolved(x, weight, tier, *settings), window)
    torch.testing.assert_close(out["fast"].mean, out["accurate"].mean)
    torch.testing.assert_close(out["fast"].variance, out["accurate"].variance)


@pytest.mark.parametrize(
    ("n", "window"), [(1, [3]), (2, [2, 2]), (2, [3, 2]), (2, [1, 3]), (2, [2, 1]), (3, [2, 1, 2])], ids=str
)
def test_rows_of_a_window_have_one_variance_in_tier_fast(n, window):
    """The maximum of all elements, the last one first, by their rows' variances and one contrast."""
    x, weight = image(n, 8, batch=3), smoothing(n, 4, 3)
    z = convolved(x, weight, "fast")
    out = Setting(getattr(aten, f"max_pool{n}d").default, (), fidelity="fast").rule(z, window)
    shared = getattr(F, f"avg_pool{n}d")(z.variance, [*[1] * (n - 1), window[-1]])
    shared = shared.repeat_interleave(window[-1], -1)
    places = list(itertools.product(*map(range, window)))
    pairs = itertools.combinations(places, 2)
    contrast = z.fact(Contrast).told([[b - a for a, b in zip(*pair, strict=True)] for pair in pairs])
    counts = [size // k for size, k in zip(z.shape[-n:], window, strict=True)]

    def element(place):
        steps = zip(place, window, counts, strict=True)
        here = (..., *[slice(start, k * count, k) for start, k, count in steps])
        return z.mean[here], shared[here]

    rows = []
    for start in range(len(places), 0, -window[-1]):
        best, *others = map(element, places[start - window[-1] : start][::-1])
        for other in others:
            best = contrasted_max_moments(*other, *best, contrast)
        rows.append(best)
    best, *others = rows
    for other in others:
        best = contrasted_max_moments(*other, *best, contrast)
    torch.testing.assert_close((out.mean, out.variance), best)


def test_tier_fast_is_close_where_variance_varies():
    """Measured: averages over rows and channels leave a seventh of the error that none has, at the median."""
    x, weight = image(2, 16, batch=4), smoothing(2, 8, 3)
    rules = {t: Setting(aten.max_pool2d.default, (), fidelity=t).rule for t in ("paper", "fast", "accurate")}
    out = {t: rule(convolved(x, weight, t), [2, 2]) for t, rule in rules.items()}
    for part in ("mean", "variance"):
        rough, none = (
            (getattr(out[t], part) - getattr(out["accurate"], part)).abs().median() for t in ("fast", "paper")
        )
        assert rough < none / 4, part


@pytest.mark.parametrize(
    "settings",
    [([3, 3], [2, 2], [1, 1]), ([3, 3], [2, 2], [0, 0], [1, 1], True)],
    ids=["padded", "ceil_mode"],
)
def test_windows_over_the_border_are_no_worse_with_covariance(settings):
    """Padding has no covariance with anything: to take it for a neighbour would show here."""
    x, weight = image(2, 6), smoothing(2, 3, 3)
    pool = Setting(aten.max_pool2d.default, (), fidelity="fast")
    samples = sampled_maxima(x, weight, (), lambda z: pool.op(z, *settings), count=40_000)
    told = pool.rule(convolved(x, weight, "fast"), *settings)
    alone = pool.rule(plain(convolved(x, weight, "fast")), *settings)
    with_it, without = (((o.mean - samples.mean).abs() / samples.variance.sqrt()) for o in (told, alone))
    assert (with_it <= without + 0.05).all()


@pytest.mark.parametrize(
    ("window", "stride"), [([2, 2], [2, 2]), ([3, 3], [2, 2]), ([2, 1], [1, 1])], ids=str
)
def test_weights_of_the_maximum_are_a_distribution(window, stride):
    """How much of the maximum each element of a window is: the transposed map gives 1 back per window."""
    rule = Setting(aten.max_pool2d.default, (), fidelity="accurate").rule
    x = convolved(image(2, 8, batch=2), smoothing(2, 3, 3), "accurate")
    out = rule(x, window, stride)
    rows = unit_rows(out.mean)
    part = linear_part(rule, x, window, stride)
    (pulled,) = part.pull(rows)
    assert (pulled >= 0).all()
    torch.testing.assert_close(pulled.flatten(1).sum(1), torch.ones(len(rows), dtype=torch.float64))
    assert (part.noise >= 0).all()


def test_linear_part_of_a_pair_of_correlated_elements():
    """V_out = J C J^T + noise with the full covariance C of the elements."""
    rule = Setting(aten.max_pool1d.default, (), fidelity="accurate").rule
    x, weight = image(1, 8), smoothing(1, 1, 3)
    z = convolved(x, weight, "accurate")
    jacobian = torch.func.jacrev(lambda v: F.conv1d(v, weight).flatten())(x.mean).flatten(1)
    covariance = jacobian @ torch.diag(x.variance.flatten()) @ jacobian.T
    out = rule(z, [2])
    part = linear_part(rule, z, [2])
    (pulled,) = part.pull(unit_rows(out.mean))
    explained = (pulled.flatten(1) @ covariance @ pulled.flatten(1).T).diagonal()
    torch.testing.assert_close(explained + part.noise.flatten(), out.variance.flatten())
