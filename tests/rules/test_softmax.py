from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._ops import OpOverload

from momentprop.moments import Moments
from properties import DTYPES, AnyRule, ApproximateRule, check_gradients, gaussian_samples
from rule_settings import Setting, X, fixed, reason_of

aten = torch.ops.aten
TIERS = ["paper", "fast"]
OPS = [aten.softmax.int, aten.log_softmax.int]
PROBABILITIES, LOGARITHMS = OPS


def rule(op, tier):
    return Setting(op, (), fidelity=tier).rule


SETTINGS = [
    Setting(op, args, fidelity=tier)
    for op, tier in [(PROBABILITIES, "paper"), (PROBABILITIES, "fast"), (LOGARITHMS, "fast")]
    for args in [
        (X(2), 0),
        (X(3, 2), -1),
        (X(3, 5), 1),
        (X(5, 3), 0),
        (X(2, 4, 3), -2),
        (X(70), 0),  # more logits than are compared at a time
    ]
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestSoftmax(AnyRule):
    def check_is_the_operator_where_variance_vanishes(self, setting: Setting) -> None:
        """But for tier `paper`, whose probit is within a distance of the logistic function (see below)."""
        if setting.fidelity != "paper" or setting.op is LOGARITHMS:
            super().check_is_the_operator_where_variance_vanishes(setting)

    def test_gradients_are_right(self, setting: Setting) -> None:
        check_gradients(setting)

    def test_gradients_are_right_at_ties(self, setting: Setting) -> None:
        check_gradients(setting, fixed(mean=0.5))

    def test_casts_to_dtype(self, setting: Setting) -> None:
        x, dim = setting.arguments(torch.float32)
        out = setting.rule(x, dim, torch.float64)
        reference = setting.rule(x.to(torch.float64), dim)
        assert out.mean.dtype == out.variance.dtype == torch.float64
        assert torch.equal(out.mean, reference.mean)
        assert torch.equal(out.variance, reference.variance)


def logits(n_classes: int, spread: float, variance: float, rows: int) -> Moments:
    """Means with the given standard deviation; variances around the given one, by a factor of 0.4 to 2.7."""
    mean, log_factor = torch.randn(2, rows, n_classes, dtype=torch.float64)
    return Moments(mean * spread, variance * (log_factor / 2).exp())


@cache
def sampled(n_classes: int, variance: float) -> list[tuple[Moments, dict[OpOverload, Moments]]]:
    """Logits whose means spread by 1 and by 3, and what sampling, in float32, gives for both operators."""
    torch.manual_seed(0)
    cases = []
    for spread in (1.0, 3.0):
        x = logits(n_classes, spread, variance, rows=min(400 // n_classes, 20))
        z = gaussian_samples(x, 20_000).float()
        cases.append((x, {op: Moments(*torch.var_mean(op(z, -1), 0)[::-1]) for op in OPS}))
    return cases


def worst_errors(op: OpOverload, tier: str, n_classes: int, variance: float) -> tuple[float, float]:
    """Of mean and standard deviation, absolute."""
    worst_mean = worst_std = 0.0
    for x, samples in sampled(n_classes, variance):
        out, true = rule(op, tier)(x, -1), samples[op]
        worst_mean = max(worst_mean, (out.mean - true.mean).abs().max().item())
        worst_std = max(worst_std, (out.std - true.std).abs().max().item())
    return worst_mean, worst_std


@pytest.mark.parametrize(
    ("tier", "n_classes", "variance", "mean_measured", "std_measured"),
    [
        ("paper", 2, 0.1, 0.0170, 0.0097),
        ("paper", 2, 1.0, 0.0133, 0.0365),
        ("paper", 2, 4.0, 0.0081, 0.0496),
        ("paper", 10, 0.1, 0.0670, 0.0170),
        ("paper", 10, 1.0, 0.0788, 0.0446),
        ("paper", 10, 4.0, 0.1522, 0.0695),
        ("paper", 100, 0.1, 0.0562, 0.0084),
        ("paper", 100, 1.0, 0.0511, 0.0835),
        ("paper", 100, 4.0, 0.1170, 0.1607),
        ("fast", 2, 0.1, 0.0023, 0.0044),
        ("fast", 2, 1.0, 0.0097, 0.0365),
        ("fast", 2, 4.0, 0.0132, 0.0496),
        ("fast", 10, 0.1, 0.0013, 0.0046),
        ("fast", 10, 1.0, 0.0107, 0.0462),
        ("fast", 10, 4.0, 0.0285, 0.0614),
        ("fast", 100, 0.1, 0.0007, 0.0019),
        ("fast", 100, 1.0, 0.0057, 0.0237),
        ("fast", 100, 4.0, 0.0403, 0.0774),
    ],
)
def test_probabilities_error_is_bounded(tier, n_classes, variance, mean_measured, std_measured):
    """Measured worst errors, absolute. In tier `paper` most of the mean's is that of the pairwise formula.

    That formula is right for two classes; its error grows with their number and with the variance.
    """
    mean_error, std_error = worst_errors(PROBABILITIES, tier, n_classes, variance)
    assert mean_error <= 1.5 * mean_measured
    assert std_error <= 1.5 * std_measured


@pytest.mark.parametrize(
    ("n_classes", "variance", "mean_measured", "std_measured"),
    [
        (2, 0.1, 0.0072, 0.0079),
        (2, 1.0, 0.1188, 0.1278),
        (2, 4.0, 0.5432, 0.3740),
        (10, 0.1, 0.0092, 0.0148),
        (10, 1.0, 0.2003, 0.2161),
        (10, 4.0, 1.0500, 0.7836),
        (100, 0.1, 0.0091, 0.0091),
        (100, 1.0, 0.0953, 0.1237),
        (100, 4.0, 0.6580, 0.4338),
    ],
)
def test_log_probabilities_error_is_bounded(n_classes, variance, mean_measured, std_measured):
    """Measured worst errors, absolute; the same in every tier."""
    mean_error, std_error = worst_errors(LOGARITHMS, "fast", n_classes, variance)
    assert mean_error <= 1.5 * mean_measured
    assert std_error <= 1.5 * std_measured


@pytest.mark.parametrize("n_classes", [2, 3, 10, 63, 64, 65, 129, 1000])
@pytest.mark.parametrize("tier", TIERS)
def test_probabilities_sum_to_one(tier, n_classes):
    for dtype in DTYPES:
        for spread, variance in [(0.0, 0.0), (1.0, 0.1), (3.0, 4.0), (100.0, 1e4), (1e6, 1e12), (1e6, 0.0)]:
            x = logits(n_classes, spread, variance, rows=2).to(dtype)
            p = rule(PROBABILITIES, tier)(x, -1).mean.double()
            assert (p > 0).all()
            assert ((p.sum(-1) - 1).abs() <= 1e-6).all()


@pytest.mark.parametrize("n_classes", [2, 3, 10, 100, 1000])
@pytest.mark.parametrize("spread", [1.0, 10.0, 1e3])
def test_default_tier_is_softmax_without_variance(n_classes, spread):
    mean = torch.randn(4, n_classes, dtype=torch.float64) * spread
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        x = Moments(mean.to(dtype), 0.0)
        out = rule(PROBABILITIES, "fast")(x, -1)
        torch.testing.assert_close(out.mean, x.mean.softmax(-1), rtol=0, atol=tolerance)
        assert not out.variance.any()
        logarithms = rule(LOGARITHMS, "fast")(x, -1)
        torch.testing.assert_close(
            logarithms.mean, x.mean.log_softmax(-1), rtol=tolerance, atol=1e2 * tolerance
        )
        assert not logarithms.variance.any()


@pytest.mark.parametrize(("n_classes", "measured"), [(2, 0.0177), (10, 0.0819), (100, 0.221)])
def test_paper_tier_is_near_softmax_without_variance(n_classes, measured):
    """Total variation between the probit approximation and softmax, for means that spread by 0 to 10."""
    worst = 0.0
    for spread in (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0):
        mean = torch.randn(min(200, 5000 // n_classes), n_classes, dtype=torch.float64) * spread
        out = rule(PROBABILITIES, "paper")(Moments(mean, 0.0), -1)
        distance = (out.mean - mean.softmax(-1)).abs().sum(-1) / 2
        worst = max(worst, distance.max().item())
        assert not out.variance.any()
    assert worst <= 1.5 * measured


finite_logits = st.tuples(
    st.floats(-1e6, 1e6, width=32), st.one_of(st.just(0.0), st.floats(-30, 12).map(lambda x: 10**x))
)


@pytest.mark.parametrize("tier", TIERS)
@given(st.lists(finite_logits, min_size=2, max_size=12))
def test_no_class_is_excluded(tier, elements):
    for dtype in DTYPES:
        x = Moments(*torch.tensor(elements, dtype=dtype).T)
        out = rule(PROBABILITIES, tier)(x, 0)
        assert (out.mean > 0).all()
        assert abs(out.mean.double().sum() - 1) <= 1e-6
        assert (out.variance >= 0).all()
        assert (out.variance <= out.mean * (1 - out.mean) + 2 * torch.finfo(dtype).eps).all()
        logarithms = rule(LOGARITHMS, tier)(x, 0)
        assert logarithms.mean.isfinite().all()
        assert (logarithms.mean <= 0).all()
        assert logarithms.variance.isfinite().all()
        assert (logarithms.variance >= 0).all()


def test_variance_of_a_sure_class_survives_float32():
    """Its variance is what the others leave over: not the difference of two sums near its own term."""
    x = Moments(torch.tensor([[15.0, 0.0, 0.0]]), 1.0)
    for op in OPS:
        single = rule(op, "fast")(x, -1)
        double = rule(op, "fast")(x.to(torch.float64), -1)
        torch.testing.assert_close(single.variance.double(), double.variance, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_class_that_rounds_to_one_varies(dtype):
    x = Moments(torch.tensor([[50.0, 0.0, 0.0]], dtype=dtype), 0.1)
    assert rule(PROBABILITIES, "fast")(x, -1).variance[0, 0] > 0


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e10, 1e15])
@pytest.mark.parametrize("op", [*OPS, aten.logsumexp.default], ids=str)
def test_float32_agrees_with_float64_at_large_scales(op, scale):
    mean, noise = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = Moments(mean * scale, (noise * scale).square())
    dims = [1] if op is aten.logsumexp.default else 1
    double, single = (Setting(op, ()).rule(v, dims) for v in (x, x.to(torch.float32)))
    size = 1.0 if op is PROBABILITIES else scale
    torch.testing.assert_close(single.mean.double(), double.mean, rtol=0, atol=1e-3 * size)
    torch.testing.assert_close(single.std.double(), double.std, rtol=0, atol=1e-3 * size)


@pytest.mark.parametrize("tier", TIERS)
def test_only_class_is_certain(tier):
    x = Moments(torch.randn(3, 1), 2.0)
    out, logarithms = rule(PROBABILITIES, tier)(x, 1), rule(LOGARITHMS, tier)(x, 1)
    assert torch.equal(out.mean, torch.ones(3, 1))
    assert not torch.cat([out.variance, logarithms.mean, logarithms.variance]).any()


@pytest.mark.parametrize("tier", TIERS)
def test_masked_logits_take_no_part(tier):
    infinite = float("-inf")
    mean, variance = [[1.0, infinite, 0.0, infinite, -1.0]], [[1.0, 0.0, 2.0, 0.0, 0.5]]
    masked = Moments(torch.tensor(mean), torch.tensor(variance))
    plain = Moments(torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[1.0, 2.0, 0.5]]))
    out, reference = rule(PROBABILITIES, tier)(masked, -1), rule(PROBABILITIES, tier)(plain, -1)
    torch.testing.assert_close(out.mean[:, [0, 2, 4]], reference.mean)
    torch.testing.assert_close(out.variance[:, [0, 2, 4]], reference.variance)
    assert (out.mean[:, [1, 3]] < 1e-30).all()
    assert not out.variance[:, [1, 3]].any()


@pytest.mark.parametrize("tier", TIERS)
def test_more_variance_makes_the_prediction_less_sure(tier):
    mean = torch.tensor([3.0, 0.0, -1.0], dtype=torch.float64).expand(6, 3)
    variance = torch.tensor([0.0, 0.1, 1.0, 10.0, 100.0, 1e6], dtype=torch.float64)[:, None].expand(6, 3)
    p = rule(PROBABILITIES, tier)(Moments(mean, variance), -1).mean
    entropy = torch.special.entr(p).sum(-1)
    assert (entropy.diff() > 0).all()
    torch.testing.assert_close(p[-1], torch.full_like(p[-1], 1 / 3), rtol=0, atol=0.01)


LOG_SUMS = [
    Setting(aten.logsumexp.default, (X(3, 5), [1])),
    Setting(aten.logsumexp.default, (X(3, 5), [-1], True)),
    Setting(aten.logsumexp.default, (X(4, 2), [0], True)),
]


@pytest.mark.parametrize("setting", LOG_SUMS, ids=str)
class TestLogSumExp(ApproximateRule):
    unexplained = 1e-9
    overexplained = 1e-9
    mean_bound = 0.15
    variance_bound = 0.4


def test_log_sum_over_several_dimensions_is_refused():
    assert "several" in reason_of(Setting(aten.logsumexp.default, (X(2, 3), [0, 1])))
