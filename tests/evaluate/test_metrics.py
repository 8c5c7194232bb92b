"""Every metric against an implementation that shares nothing with it; every interval against its level."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn import metrics as sk
from torch import Tensor

import vision
from momentprop.evaluate import metrics
from momentprop.evaluate.metrics import Estimate

DENSE = [(50,), (20, 3), (10, 4, 5)]  # shapes of targets


pytestmark = pytest.mark.usefixtures("one_thread")


def classified(shape: tuple[int, ...] = (200,), k: int = 4, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    logits = torch.randn(shape[0], k, *shape[1:], dtype=torch.float64)
    target = torch.distributions.Categorical(logits=logits.movedim(1, -1)).sample()
    return (scale * logits).softmax(1), target


def flat(probs: Tensor, target: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return probs.movedim(1, -1).reshape(-1, probs.shape[1]).numpy(), target.flatten().numpy()


def standard_error_interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    low, high = stats.norm.interval(level, values.mean(), stats.sem(values))
    return float(low), float(high)


def share_covered(interval: Callable[[int], Estimate], truth: float, repetitions: int) -> float:
    hits = [e.low <= truth <= e.high for e in map(interval, range(repetitions))]
    return sum(hits) / repetitions


# ------------------------------------------------------------------------------------------- estimates


def test_estimate_prints_enough_digits_to_tell_its_ends_apart() -> None:
    assert str(Estimate(0.941, 0.930, 0.952)) == "0.941 (0.930..0.952)"
    assert str(Estimate(0.94123, 0.94110, 0.94140)) == "0.94123 (0.94110..0.94140)"
    assert str(Estimate(1.0, 1.0, 1.0)) == "1.000 (1.000..1.000)"
    assert str(Estimate(math.inf, math.inf, math.inf)) == "inf (inf..inf)"
    assert str(Estimate(2e-20, 1e-20, 3e-20)) == "2e-20 (1e-20..3e-20)"


def test_estimate_is_frozen_and_goes_through_json() -> None:
    estimate = Estimate(0.5, 0.4, 0.6, 0.9)
    assert Estimate(**json.loads(json.dumps(estimate.to_dict()))) == estimate
    with pytest.raises(AttributeError):
        estimate.value = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 30), (30, 30), (7, 31), (999, 1000)])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_wilson(k: int, n: int, level: float) -> None:
    expected = stats.binomtest(k, n).proportion_ci(level, method="wilson")
    got = metrics.wilson(k, n, level)
    assert got.value == k / n
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=1e-14)
    assert 0 <= got.low <= got.value <= got.high <= 1


@pytest.mark.parametrize(("k", "n"), [(0, 0), (-1, 5), (6, 5), (math.nan, 5)])
def test_wilson_refuses_impossible_counts(k: float, n: float) -> None:
    with pytest.raises(ValueError, match=f"not {k} of {n}"):
        metrics.wilson(k, n)


@pytest.mark.parametrize("level", [0.0, 1.0, 95, -0.5])
def test_a_level_is_a_probability(level: float) -> None:
    for refused in (
        lambda: metrics.wilson(1, 2, level),
        lambda: metrics.pearson(torch.randn(9), torch.randn(9), level=level),
        lambda: metrics.bootstrap(torch.mean, torch.randn(5), level=level, n_resamples=2),
        lambda: metrics.nll(*classified(), level=level),
        lambda: metrics.auroc(torch.randn(5), torch.randn(5), level=level),
    ):
        with pytest.raises(ValueError, match=f"level must be between 0 and 1, not {level}"):
            refused()


@pytest.mark.parametrize("n", [4, 30, 1000])
@pytest.mark.parametrize("slope", [-2.0, 0.0, 0.7])
def test_pearson(n: int, slope: float) -> None:
    a = torch.randn(n, dtype=torch.float64)
    b = slope * a + torch.randn(n, dtype=torch.float64)
    expected = stats.pearsonr(a.numpy(), b.numpy())
    interval = expected.confidence_interval(0.9)
    got = metrics.pearson(a, b, level=0.9)
    assert got.value == pytest.approx(expected.statistic, abs=1e-12)
    assert (got.low, got.high) == pytest.approx((interval.low, interval.high), abs=1e-10)


def test_pearson_at_the_ends() -> None:
    a = torch.linspace(0.1, 1, 7)
    assert metrics.pearson(a, 3 * a).value == pytest.approx(1, abs=1e-6)
    exact = torch.arange(8.0)
    assert metrics.pearson(exact, -exact).to_dict() == pytest.approx(
        {"value": -1, "low": -1, "high": -1, "level": 0.95}, abs=1e-6
    )
    few = metrics.pearson(torch.tensor([0.0, 1, 2]), torch.tensor([0.0, 2, 1]))
    assert (few.low, few.high) == (-1, 1)
    # a large offset in float32 costs digits of the inputs, not of the formula
    shifted = metrics.pearson(1e6 + exact, 1e6 + exact.flip(0))
    assert shifted.value == pytest.approx(-1, abs=1e-12)
    with pytest.raises(ValueError, match="all values of b are equal"):
        metrics.pearson(a, torch.full((7,), 0.1))


# ------------------------------------------------------------------------------------------- bootstrap


def test_bootstrap_agrees_with_scipy() -> None:
    a = torch.randn(80, dtype=torch.float64)
    b = 0.5 * a + torch.randn(80, dtype=torch.float64)

    def ratio(a: Any, b: Any) -> Any:
        return a.std() / b.std()

    got = metrics.bootstrap(ratio, a, b, n_resamples=4000)
    expected = stats.bootstrap(
        (a.numpy(), b.numpy()),
        lambda a, b: ratio(torch.from_numpy(a), torch.from_numpy(b)).item(),
        paired=True,
        vectorized=False,
        method="percentile",
        n_resamples=4000,
        rng=np.random.default_rng(0),
    ).confidence_interval
    assert got.value == pytest.approx((a.std() / b.std()).item())
    tolerance = 0.06 * (expected.high - expected.low)  # of the two sets of resamples
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=tolerance)


def test_bootstrap_draws_the_same_rows_of_all_tensors() -> None:
    a = torch.randn(50)

    def mismatch(a: Tensor, b: Tensor) -> float:
        assert a.shape == (50,)
        assert b.shape == (50, 1, 1)
        return (b.flatten() - 2 * a).abs().max().item()

    assert metrics.bootstrap(mismatch, a, (2 * a).reshape(50, 1, 1), n_resamples=50).high == 0


def test_bootstrap_follows_from_its_seed_alone() -> None:
    x = torch.randn(40)
    state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    first = metrics.bootstrap(torch.mean, x, n_resamples=50)
    assert torch.equal(state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])
    assert python_state == random.getstate()
    torch.rand(3)
    assert metrics.bootstrap(torch.mean, x, n_resamples=50) == first
    other = metrics.bootstrap(torch.mean, x, n_resamples=50, seed=1)
    assert other.value == first.value
    assert (other.low, other.high) != (first.low, first.high)


def test_every_bootstrapped_metric_follows_from_its_seed() -> None:
    probs, target = classified((60,))
    known, novel = torch.randn(30), torch.randn(30) + 1
    state = torch.get_rng_state()
    for metric, arguments in (
        (metrics.ece, (probs, target)),
        (metrics.rmse, (known, novel)),
        (metrics.aupr, (known, novel)),
        (metrics.fpr_at_tpr, (known, novel)),
    ):
        runs = [metric(*arguments, n_resamples=40, seed=seed) for seed in (3, 3, 4)]
        assert runs[0] == runs[1]
        assert runs[0] != runs[2]
        assert runs[0].value == runs[2].value
    assert torch.equal(state, torch.get_rng_state())


def test_bootstrap_refuses() -> None:
    x = torch.randn(5)
    with pytest.raises(ValueError, match=r"different numbers of rows: \[5, 4\]"):
        metrics.bootstrap(torch.dist, x, x[:4])
    for nothing in ((), (x[:0],), (x[0],)):
        with pytest.raises(ValueError, match="at least one row"):
            metrics.bootstrap(torch.mean, *nothing)
    with pytest.raises(ValueError, match="n_resamples must be at least 1, not 0"):
        metrics.bootstrap(torch.mean, x, n_resamples=0)
    with pytest.raises(ValueError, match="NaN in 20 of 20 resamples"):
        metrics.bootstrap(lambda _: math.nan, x, n_resamples=20)


# -------------------------------------------------------------------- do intervals cover what they say?


def test_accuracy_covers_the_true_rate() -> None:
    truth, n = 0.93, 80
    right = torch.rand(800, n) < truth
    probs = torch.tensor([[0.7, 0.3]]).expand(n, 2)
    share = share_covered(lambda i: metrics.accuracy(probs, (~right[i]).long()), truth, 800)
    assert 0.90 <= share <= 0.99


def test_accuracy_of_pixels_counts_images_not_pixels() -> None:
    """Each image is right or wrong as a whole: 64 pixels know no more than one."""
    truth, n = 0.8, 60
    right = (torch.rand(300, n) < truth)[..., None, None].expand(-1, -1, 8, 8)
    probs = torch.tensor([0.7, 0.3])[None, :, None, None].expand(n, 2, 8, 8)
    estimates = [metrics.accuracy(probs, (~r).long()) for r in right]
    assert 0.90 <= share_covered(lambda i: estimates[i], truth, 300) <= 0.99
    # the textbook interval of n * 64 independent pixels would cover about one time in five
    as_pixels = [metrics.wilson(e.value * n * 64, n * 64) for e in estimates]
    assert share_covered(lambda i: as_pixels[i], truth, 300) < 0.5


def test_accuracy_of_independent_pixels_is_wilsons() -> None:
    probs, target = classified((400, 25))
    p, t = flat(probs, target)
    right = int((p.argmax(1) == t).sum())
    expected = stats.binomtest(right, len(t)).proportion_ci(method="wilson")
    got = metrics.accuracy(probs, target)
    assert got.high - got.low == pytest.approx(expected.high - expected.low, rel=0.15)


def test_pearson_covers_the_true_correlation() -> None:
    truth, n = 0.8, 30
    x = torch.randn(500, 2, n, dtype=torch.float64)
    b = truth * x[:, 0] + math.sqrt(1 - truth**2) * x[:, 1]
    share = share_covered(lambda i: metrics.pearson(x[i, 0], b[i]), truth, 500)
    assert 0.90 <= share <= 0.99


def test_bootstrap_covers_the_true_mean_and_rmse() -> None:
    x = torch.randn(200, 60, dtype=torch.float64)
    zero = torch.zeros(60)
    mean = share_covered(lambda i: metrics.bootstrap(torch.mean, x[i], n_resamples=100), 0.0, 200)
    root = share_covered(lambda i: metrics.rmse(x[i], zero, n_resamples=100), 1.0, 200)
    assert 0.90 <= mean <= 0.99
    assert 0.90 <= root <= 0.99


def test_auroc_covers_the_true_area_also_near_one() -> None:
    for shift in (0.5, 2.5):
        truth = float(stats.norm.cdf(shift / math.sqrt(2)))
        known, novel = torch.randn(200, 50), torch.randn(200, 30) + shift
        share = share_covered(lambda i, k=known, v=novel: metrics.auroc(k[i], v[i]), truth, 200)
        assert 0.90 <= share <= 0.99


def test_fpr_covers_the_true_rate() -> None:
    known, novel = torch.randn(200, 150), torch.randn(200, 150) + 1.5
    truth = float(stats.norm.sf(1.5 + stats.norm.ppf(0.1)))
    share = share_covered(lambda i: metrics.fpr_at_tpr(known[i], novel[i], 0.9, n_resamples=150), truth, 200)
    assert 0.89 <= share <= 0.99


@pytest.mark.parametrize("overconfident", [False, True])
def test_ece_covers_the_true_error_where_percentiles_do_not(overconfident: bool) -> None:
    n, power = 150, 2.0 if overconfident else 1.0
    truth = _true_ece(power)
    confidence = 0.5 + 0.5 * torch.rand(80, n, dtype=torch.float64)
    wrong = (torch.rand(80, n, dtype=torch.float64) > confidence**power).long()
    probs = torch.stack([confidence, 1 - confidence], 2)
    estimates = [metrics.ece(p, t, n_resamples=60) for p, t in zip(probs, wrong, strict=True)]
    assert all(e.low <= e.value <= e.high for e in estimates)
    assert share_covered(lambda i: estimates[i], truth, 80) >= 0.85
    if overconfident:
        assert sum(e.low > 0 for e in estimates) > 60  # it can tell
    else:
        assert sum(e.value > 0.03 for e in estimates) > 60  # what chance alone makes of zero


def _true_ece(power: float) -> float:
    """Confidence c uniform on 0.5..1, right with probability c^power: the sum over bins of |integral|."""
    edges = np.union1d(np.linspace(0, 1, 16), [0.5])
    edges = edges[edges >= 0.5]
    bins = [integrate.quad(lambda c: 2 * (c - c**power), a, b)[0] for a, b in pairwise(edges)]
    return float(np.abs(bins).sum())


# -------------------------------------------------------------------------------------- classification


@pytest.mark.parametrize("shape", DENSE)
def test_accuracy_nll_and_brier(shape: tuple[int, ...]) -> None:
    probs, target = classified(shape)
    p, t = flat(probs, target)
    assert metrics.accuracy(probs, target).value == pytest.approx(sk.accuracy_score(t, p.argmax(1)))
    assert metrics.nll(probs, target).value == pytest.approx(sk.log_loss(t, p, labels=range(4)))
    assert metrics.nll(probs.log(), target).value == pytest.approx(sk.log_loss(t, p, labels=range(4)))
    expected = np.mean([sum((p[i, k] - (t[i] == k)) ** 2 for k in range(4)) for i in range(len(t))])
    assert metrics.brier(probs, target).value == pytest.approx(expected)


def test_brier_of_two_classes_is_twice_that_of_one() -> None:
    probs, target = classified(k=2)
    one = sk.brier_score_loss(target.numpy(), probs[:, 1].numpy())
    assert metrics.brier(probs, target).value == pytest.approx(2 * one)


def test_intervals_of_means_are_standard_errors_over_rows() -> None:
    probs, target = classified((150,))
    p, t = flat(probs, target)
    losses = -np.log(p[np.arange(len(t)), t])
    got = metrics.nll(probs, target, level=0.9)
    assert (got.low, got.high) == pytest.approx(standard_error_interval(losses, 0.9))
    assert got.level == 0.9
    probs, target = classified((30, 7))
    losses = -probs.gather(1, target[:, None])[:, 0].log().numpy()
    got = metrics.nll(probs, target)
    assert (got.low, got.high) == pytest.approx(standard_error_interval(losses.mean(1)))
    got = metrics.brier(probs, target)
    rows = (probs - torch.eye(4)[target].movedim(-1, 1)).square().sum(1).mean(1).numpy()
    assert (got.low, got.high) == pytest.approx(standard_error_interval(rows))


def test_nll_of_what_was_impossible() -> None:
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    for predicted in (probs, probs.log()):
        got = metrics.nll(predicted, torch.tensor([1, 0]))
        assert (got.value, got.low, got.high) == (math.inf, math.inf, math.inf)
        assert metrics.nll(predicted, torch.tensor([0, 0])).value == pytest.approx(math.log(2) / 2)


def test_nll_of_log_probabilities_keeps_what_float32_probabilities_lose() -> None:
    logits = torch.tensor([[0.0, 200.0]])
    assert metrics.nll(logits.log_softmax(1), torch.tensor([0])).value == pytest.approx(200)


def test_one_observation_leaves_everything_open() -> None:
    probs = torch.tensor([[0.5, 0.5]])
    got = metrics.nll(probs, torch.tensor([0]))
    assert (got.low, got.high) == (0, math.inf)
    got = metrics.brier(probs, torch.tensor([0]))
    assert (got.low, got.high) == (0, 2)
    one = torch.zeros(1)
    got = metrics.gaussian_nll(one, one + 1, one)
    assert (got.low, got.high) == (-math.inf, math.inf)


def test_a_single_class_is_certain() -> None:
    one = torch.ones(5, 1)
    target = torch.zeros(5, dtype=torch.long)
    assert metrics.nll(one, target).value == 0
    assert metrics.nll(one.log(), target).value == 0
    assert metrics.accuracy(one, target).value == 1


def by_hand(p: np.ndarray, t: np.ndarray, n_bins: int) -> float:
    """Bins [i/n, (i+1)/n), the last one closed."""
    confidence, right = p.max(1), p.argmax(1) == t
    total = 0.0
    for i in range(n_bins):
        last = i == n_bins - 1
        inside = (confidence >= i / n_bins) & ((confidence < (i + 1) / n_bins) | last)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return total


@pytest.mark.parametrize("n_bins", [1, 7, 15])
@pytest.mark.parametrize("shape", DENSE)
def test_ece(n_bins: int, shape: tuple[int, ...]) -> None:
    probs, target = classified(shape, scale=2.0)
    expected = by_hand(*flat(probs, target), n_bins)
    assert metrics.ece(probs, target, n_bins, n_resamples=5).value == pytest.approx(expected)
    confidence, accuracy, count = metrics.reliability(probs, target, n_bins)
    assert count.sum() == target.numel()
    assert (count * (confidence - accuracy).abs()).nansum() / count.sum() == pytest.approx(expected)


def test_ece_of_certainty_shares_the_last_bin() -> None:
    """0.95 and wrong, 1.0 and right: in one bin they make up for each other."""
    probs = torch.tensor([[0.95, 0.05]] + [[1.0, 0.0]] * 9, dtype=torch.float64)
    target = torch.tensor([1] + [0] * 9)
    got = metrics.ece(probs, target, n_bins=10, n_resamples=5)
    assert got.value == pytest.approx(abs(0.9 - (0.95 + 9) / 10))
    assert metrics.reliability(probs, target, 10)[2].tolist() == [0.0] * 9 + [10.0]


def test_ece_takes_a_probability_above_one_by_rounding_for_a_probability() -> None:
    probs = torch.tensor([[1 + 1e-6, 0.0], [0.6, 0.4]])
    target = torch.tensor([0, 0])
    assert metrics.ece(probs, target, n_resamples=5).value == pytest.approx(0.2, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_accepted(dtype: torch.dtype) -> None:
    probs, target = classified((100,), k=10)
    near = metrics.brier(probs.to(dtype), target).value
    assert near == pytest.approx(metrics.brier(probs, target).value, rel=0.02)


CLASSIFICATION = [metrics.accuracy, metrics.nll, metrics.brier, metrics.ece, metrics.reliability]


@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_classification_refuses(metric: Callable[..., Any]) -> None:
    probs, target = classified((6,), k=3)
    for bad_probs, bad_target, message in (
        (probs[:0], target[:0], "target is empty"),
        (probs, target[:5], r"not \[6, 3\] and \[5\]"),
        (probs[0], target[0], r"not \[3\] and \[\]"),
        (probs, target[:, None], r"not \[6, 3\] and \[6, 1\]"),
        (probs, target + 3, r"targets must be within 0..2; they reach from 3 to"),
        (probs, target - 100, r"targets must be within 0..2; they reach from -100 to"),
        (probs, target.double(), "targets must be integers, not torch.float64"),
        (probs.masked_fill(probs == probs.max(), math.nan), target, "probs contains NaN, in 1 of 18 places"),
        (5 * probs.log(), target, "apply softmax to logits"),
        (2 * probs, target, "one sum is 2"),
        (torch.tensor([[1.5, -0.5, 0.0]] * 6), target, "the smallest value -0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            metric(bad_probs, bad_target)


def test_nll_refuses_the_mean_of_log_probabilities() -> None:
    """E[log p] is no log-probability: its exponentials sum to less than one."""
    log_probs = torch.randn(20, 6, 3).log_softmax(-1).mean(0)
    with pytest.raises(ValueError, match="average probabilities, not their logarithms"):
        metrics.nll(log_probs, torch.zeros(6, dtype=torch.long))


def test_at_least_one_bin() -> None:
    for metric in (metrics.ece, metrics.reliability):
        with pytest.raises(ValueError, match="n_bins must be at least 1, not 0"):
            metric(*classified(), n_bins=0)


# ------------------------------------------------------------------------------------------ regression


def test_rmse() -> None:
    prediction, y = torch.randn(2, 70, 3, dtype=torch.float64)
    got = metrics.rmse(prediction, y, n_resamples=2000)
    assert got.value == pytest.approx(math.sqrt(sk.mean_squared_error(y.numpy(), prediction.numpy())))
    squares = ((prediction - y) ** 2).mean(1).numpy()
    low, high = np.sqrt(standard_error_interval(squares))
    assert (got.low, got.high) == pytest.approx((low, high), rel=0.04)


def test_gaussian_nll() -> None:
    mean, y = torch.randn(2, 50, dtype=torch.float64)
    std = torch.rand(50, dtype=torch.float64) + 0.1
    losses = -stats.norm.logpdf(y.numpy(), mean.numpy(), std.numpy())
    got = metrics.gaussian_nll(mean, std, y)
    assert got.value == pytest.approx(losses.mean())
    assert (got.low, got.high) == pytest.approx(standard_error_interval(losses))


def test_gaussian_nll_in_float32_tails() -> None:
    """Squared in float32, z = 1e25 would be infinite."""
    y, std = torch.tensor([1e5]), torch.tensor([1e-20])
    expected = 0.5 * (float(y) / float(std)) ** 2
    assert metrics.gaussian_nll(torch.zeros(1), std, y).value == pytest.approx(expected)


def crps_by_integration(mean: float, std: float, y: float) -> float:
    below = integrate.quad(lambda x: stats.norm.cdf(x, mean, std) ** 2, min(y, mean) - 15 * std, y, limit=500)
    above = integrate.quad(lambda x: stats.norm.sf(x, mean, std) ** 2, y, max(y, mean) + 15 * std, limit=500)
    return float(below[0] + above[0])


@pytest.mark.parametrize(
    ("mean", "std", "y"), [(0, 1, 0), (0, 1, 1.3), (2, 0.5, -1), (-3, 4, 5), (0, 1, 6), (1, 0.01, 1.02)]
)
def test_crps_is_its_integral(mean: float, std: float, y: float) -> None:
    arguments = [torch.tensor([v], dtype=torch.float64) for v in (mean, std, y)]
    expected = crps_by_integration(mean, std, y)
    assert metrics.crps_gaussian(*arguments).value == pytest.approx(expected, rel=1e-6)


def test_crps_at_the_limits() -> None:
    def crps(mean: float, std: float, y: float, dtype: torch.dtype = torch.float32) -> float:
        return metrics.crps_gaussian(*(torch.tensor([v], dtype=dtype) for v in (mean, std, y))).value

    assert crps(1, 0, 3) == 2
    assert crps(3, 0, 3) == 0
    for std in (1e-3, 1e-12, 1e-38, 1e-45):  # the last two are subnormal in float32
        exact = torch.tensor(std, dtype=torch.float32).item()
        assert crps(0, std, 3) == pytest.approx(3 - exact / math.sqrt(math.pi), rel=1e-14)
    at_mean = (math.sqrt(2) - 1) / math.sqrt(math.pi)
    for std in (1e-45, 1e-20, 1, 1e38):
        exact = torch.tensor(std, dtype=torch.float32).item()
        assert crps(0, std, 0) == pytest.approx(at_mean * exact, rel=1e-12)
    assert crps(-3e38, 1e-45, 3e38) == pytest.approx(6e38)
    assert crps(0, 1e-300, 1e-10, torch.float64) == pytest.approx(1e-10)


def test_crps_has_the_interval_of_a_mean() -> None:
    mean, y = torch.randn(2, 40, dtype=torch.float64)
    std = torch.rand(40, dtype=torch.float64) + 0.2
    scores = np.array([crps_by_integration(*map(float, row)) for row in zip(mean, std, y, strict=True)])
    got = metrics.crps_gaussian(mean, std, y)
    assert got.value == pytest.approx(scores.mean(), rel=1e-6)
    assert (got.low, got.high) == pytest.approx(standard_error_interval(scores), rel=1e-5)


def test_coverage_and_width() -> None:
    y = torch.randn(500, dtype=torch.float64)
    low, high = torch.full_like(y, -1), 1 + torch.rand(500, dtype=torch.float64)
    inside = int(((y >= low) & (y <= high)).sum())
    expected = stats.binomtest(inside, 500).proportion_ci(method="wilson")
    got = metrics.coverage(low, high, y)
    assert got.value == inside / 500
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high))
    got = metrics.width(low, high)
    assert got.value == pytest.approx((high - low).mean().item())
    assert (got.low, got.high) == pytest.approx(standard_error_interval((high - low).numpy()))


def test_ends_belong_to_the_interval_and_may_be_infinite() -> None:
    y = torch.tensor([0.0, 1.0, 7.0])
    low, high = torch.tensor([0.0, 0.0, -math.inf]), torch.tensor([1.0, 1.0, math.inf])
    assert metrics.coverage(low, high, y).value == 1
    assert metrics.width(low, high).value == math.inf
    assert metrics.width(low[:2], low[:2]).value == 0
    assert metrics.width(high, high).value == 0  # not infinity - infinity


@pytest.mark.parametrize(
    ("metric", "names"),
    [
        (metrics.rmse, ["prediction", "y"]),
        (metrics.gaussian_nll, ["mean", "std", "y"]),
        (metrics.crps_gaussian, ["mean", "std", "y"]),
        (metrics.coverage, ["low", "high", "y"]),
        (metrics.width, ["low", "high"]),
        (metrics.pearson, ["a", "b"]),
    ],
)
def test_regression_refuses(metric: Callable[..., Estimate], names: list[str]) -> None:
    good = [torch.arange(1.0, 6.0) for _ in names]
    metric(*good)
    for i, name in enumerate(names):
        others = [*good]
        others[i] = torch.arange(1.0, 6.0)[:, None]  # [5, 1] and [5] would broadcast to [5, 5]
        with pytest.raises(ValueError, match=rf"shapes differ: .*{name} \[5, 1\]"):
            metric(*others)
        others[i] = torch.tensor([1, 2, 3, math.nan, 5])
        with pytest.raises(ValueError, match=f"{name} contains NaN, in 1 of 5 places"):
            metric(*others)
    with pytest.raises(ValueError, match=f"{names[0]} is empty"):
        metric(*(t[:0] for t in good))
    with pytest.raises(ValueError, match=f"{names[0]} has no dimension"):
        metric(*(t[0] for t in good))
    if metric not in (metrics.coverage, metrics.width):
        with pytest.raises(ValueError, match=f"{names[0]} contains infinity"):
            metric(good[0] / 0, *good[1:])


def test_standard_deviations_and_ends_must_make_sense() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="std must be positive; the smallest is 0"):
        metrics.gaussian_nll(x, x, x)
    with pytest.raises(ValueError, match="std must not be negative; the smallest is -1"):
        metrics.crps_gaussian(x, x - 1, x)
    for metric, arguments in ((metrics.width, (x, x - 1)), (metrics.coverage, (x, x - 1, x))):
        with pytest.raises(ValueError, match="low is above high in 3 of 3 places"):
            metric(*arguments)


# --------------------------------------------------------------------------------------------- novelty


def scores(n_known: int = 300, n_novel: int = 200, ties: bool = False) -> tuple[Tensor, Tensor]:
    known, novel = torch.randn(n_known), torch.randn(n_novel) + 1
    return (known.round(decimals=0), novel.round(decimals=0)) if ties else (known, novel)


def labelled(known: Tensor, novel: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return np.r_[np.zeros(len(known)), np.ones(len(novel))], torch.cat([known, novel]).double().numpy()


@pytest.mark.parametrize("ties", [False, True])
def test_auroc_is_the_chance_to_score_higher(ties: bool) -> None:
    known, novel = scores(ties=ties)
    above = (novel[:, None] > known).double() + 0.5 * (novel[:, None] == known).double()
    got = metrics.auroc(known, novel)
    assert got.value == pytest.approx(above.mean().item(), abs=1e-14)
    assert got.low < got.value < got.high


@pytest.mark.parametrize("ties", [False, True])
def test_auroc_interval_is_delongs(ties: bool) -> None:
    known, novel = scores(40, 25, ties)
    above = ((novel[:, None] > known) + 0.5 * (novel[:, None] == known)).double().numpy()
    variance = np.var(above.mean(1), ddof=1) / 25 + np.var(above.mean(0), ddof=1) / 40
    area = above.mean()
    half = stats.norm.ppf(0.975) * math.sqrt(variance) / (area * (1 - area))
    expected = 1 / (1 + np.exp(-(np.log(area / (1 - area)) + np.array([-half, half]))))
    got = metrics.auroc(known, novel)
    assert (got.low, got.high) == pytest.approx(tuple(expected))


def test_auroc_of_perfect_separation_is_not_certain() -> None:
    known, novel = torch.arange(0.0, 12.0), torch.arange(20.0, 50.0)
    got = metrics.auroc(known, novel)
    expected = stats.binomtest(12, 12).proportion_ci(method="wilson")
    assert (got.value, got.high) == (1, 1)
    assert got.low == pytest.approx(expected.low)
    assert metrics.auroc(novel, known).value == 0
    assert metrics.auroc(known, known).value == pytest.approx(0.5)
    one = metrics.auroc(known[:1], novel)
    assert one.low < 0.25
    tied = metrics.auroc(torch.ones(9), torch.ones(9))
    assert tied.low < tied.value == 0.5 < tied.high


@pytest.mark.parametrize("ties", [False, True])
def test_aupr_of_the_novel(ties: bool) -> None:
    known, novel = scores(ties=ties)
    area, total = 0.0, len(novel)
    found_before = 0
    for threshold in torch.cat([known, novel]).unique().flip(0):
        found, flagged = int((novel >= threshold).sum()), int((known >= threshold).sum())
        area += (found - found_before) / total * found / (found + flagged)
        found_before = found
    got = metrics.aupr(known, novel, n_resamples=100)
    assert got.value == pytest.approx(area)
    assert got.low < got.value < got.high
    # known inputs as the positives would be another number
    assert (
        abs(sk.average_precision_score(1 - labelled(known, novel)[0], -labelled(known, novel)[1]) - area)
        > 0.01
    )


@pytest.mark.parametrize("ties", [False, True])
def test_roc(ties: bool) -> None:
    known, novel = scores(30, 20, ties)
    false_rate, true_rate = metrics.roc(known, novel)
    thresholds = torch.cat([known, novel]).unique().flip(0)
    assert false_rate.tolist() == [0, *[(known >= t).double().mean().item() for t in thresholds]]
    assert true_rate.tolist() == [0, *[(novel >= t).double().mean().item() for t in thresholds]]
    area = torch.trapezoid(true_rate, false_rate).item()
    assert metrics.auroc(known, novel).value == pytest.approx(area, abs=1e-14)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("tpr", [0.07, 0.5, 0.95, 1.0])
def test_fpr_at_tpr(tpr: float, ties: bool) -> None:
    known, novel = scores(ties=ties)
    false_rate, true_rate, _ = sk.roc_curve(*labelled(known, novel), drop_intermediate=False)
    expected = false_rate[true_rate >= tpr - 1e-12].min()
    got = metrics.fpr_at_tpr(known, novel, tpr, n_resamples=100)
    assert got.value == pytest.approx(expected)
    assert got.low <= got.value <= got.high


def test_seven_percent_of_a_hundred_are_seven() -> None:
    """In floating point 0.07 * 100 is above 7, and the eighth score would flag the known input."""
    got = metrics.fpr_at_tpr(torch.tensor([92.5]), torch.arange(100.0), 0.07, n_resamples=2)
    assert got.value == 0


def test_stratified_bootstrap_agrees_with_scipy() -> None:
    known, novel = scores(60, 50)

    def area(known: np.ndarray, novel: np.ndarray) -> float:
        labels = np.r_[np.zeros(len(known)), np.ones(len(novel))]
        return float(sk.average_precision_score(labels, np.r_[known, novel]))

    expected = stats.bootstrap(
        (known.numpy(), novel.numpy()),
        area,
        vectorized=False,
        method="percentile",
        n_resamples=800,
        rng=np.random.default_rng(0),
    ).confidence_interval
    got = metrics.aupr(known, novel)
    tolerance = 0.12 * (expected.high - expected.low)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=tolerance)


def test_no_false_positive_seen_is_not_none_possible() -> None:
    got = metrics.fpr_at_tpr(torch.zeros(30), torch.ones(30), n_resamples=20)
    expected = stats.binomtest(0, 30).proportion_ci(method="wilson")
    assert (got.value, got.low) == (0, 0)
    assert got.high == pytest.approx(expected.high)


@pytest.mark.parametrize("metric", [metrics.auroc, metrics.aupr, metrics.fpr_at_tpr])
def test_novelty_refuses(metric: Callable[..., Estimate]) -> None:
    known, novel = scores(6, 5)
    for bad_known, bad_novel, message in (
        (known[:0], novel, "known is empty"),
        (known, novel[:0], "novel is empty"),
        (known / 0, novel, "known contains infinity"),
        (known, novel * math.nan, "novel contains NaN, in 5 of 5 places"),
        (known[:, None], novel, r"known must be one score per input, \[n\], not \[6, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            metric(bad_known, bad_novel)


@pytest.mark.parametrize("tpr", [0.0, 1.5, -1])
def test_tpr_is_a_share(tpr: float) -> None:
    with pytest.raises(ValueError, match=f"tpr must be above 0 and at most 1, not {tpr}"):
        metrics.fpr_at_tpr(torch.randn(5), torch.randn(5), tpr)


def test_gradients_and_float32_are_no_obstacle() -> None:
    known, novel = scores()
    got = metrics.auroc(known.requires_grad_(), novel.requires_grad_())
    assert got == metrics.auroc(known.double(), novel.double())
    logits = torch.randn(9, 3, requires_grad=True)
    assert math.isfinite(metrics.nll(logits.softmax(1), torch.zeros(9, dtype=torch.long)).high)


# ------------------------------------------------------------------------------------ what is not needed


def test_metrics_need_torch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchmetrics, which computed the ECE, imports torchvision, whose build may not fit torch's."""
    vision.unfit(tmp_path, monkeypatch)
    for hidden in ("numpy", "sklearn"):
        monkeypatch.setitem(sys.modules, hidden, None)
    assert 0 < metrics.ece(*classified((60,)), n_resamples=2).value < 1
    assert 0 < metrics.auroc(*scores(40, 30)).value < 1
    assert 0 < metrics.aupr(*scores(40, 30), n_resamples=2).value < 1
