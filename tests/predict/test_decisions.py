"""Decisions against brute force, scipy and scikit-learn; promises of coverage against simulation."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats
from sklearn.datasets import load_diabetes, load_digits
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.metrics import roc_curve
from torch import Tensor

from momentprop.predict.decisions import (
    ConformalIntervals,
    ConformalSets,
    SelectiveCurve,
    SelectivePoint,
    Temperature,
    Threshold,
    ood_score,
    selective_curve,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAN, INF = math.nan, math.inf


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Normal:
    """A stand-in for a regression."""

    mean: Tensor
    std: Tensor

    @property
    def epistemic(self) -> Tensor:
        return self.std.square()


def through_json(record: Any) -> Any:
    """As another process would read it; strict JSON knows no infinity."""
    return type(record).from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False)))


# Few distinct values, so that ties are common.
SCORES = st.lists(
    st.sampled_from([-INF, -1.5, 0.0, 0.1, 0.1 + 1e-9, 0.3, 2.0, 1e300, INF]), min_size=1, max_size=12
)
SHARES = st.sampled_from([0.01, 0.07, 0.1, 0.25, 1 / 3, 0.5, 0.55, 0.9, 0.95, 0.999])


# --- Out of distribution


def sampled(n_samples: int = 7, batch: int = 5, classes: int = 3) -> tuple[SimpleNamespace, Tensor]:
    """A classification given by samples of the probabilities."""
    samples = torch.randn(n_samples, batch, classes, dtype=torch.float64).mul(3).softmax(-1)
    mean = samples.mean(0)
    entropy, expected = torch.special.entr(mean).sum(1), torch.special.entr(samples).sum(2).mean(0)
    return SimpleNamespace(
        probs=mean,
        probs_variance=samples.var(0, correction=0),
        total=entropy,
        aleatoric=expected,
        epistemic=entropy - expected,
        confidence=mean.amax(1),
    ), samples


def test_ood_scores_are_what_they_are_called() -> None:
    predictive, samples = sampled()
    for i, rows in enumerate(samples.transpose(0, 1).tolist()):
        mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        entropy = -sum(p * math.log(p) for p in mean)
        expected = -sum(p * math.log(p) for row in rows for p in row) / len(rows)
        variance = sum((p - m) ** 2 for row in rows for p, m in zip(row, mean, strict=True)) / len(rows)
        found = {
            kind: ood_score(predictive, kind)[i].item()
            for kind in ("total", "epistemic", "confidence", "variance")
        }
        assert found == pytest.approx(
            {
                "total": entropy,
                "confidence": 1 - max(mean),
                "epistemic": entropy - expected,
                "variance": variance,
            }
        )
    assert torch.equal(ood_score(predictive), predictive.total)


def test_ood_scores_keep_further_dimensions() -> None:
    dense = SimpleNamespace(probs=torch.full((2, 3, 4, 5), 1 / 3), probs_variance=torch.ones(2, 3, 4, 5))
    assert torch.equal(ood_score(dense, "variance"), torch.full((2, 4, 5), 3.0))


def test_a_regression_scores_by_its_epistemic_variance() -> None:
    predictive = Normal(torch.zeros(2), torch.tensor([2.0, 3.0]))
    assert ood_score(predictive, "epistemic").tolist() == [4.0, 9.0]
    with pytest.raises(ValueError, match=r"kind='confidence'.*choose 'total' or 'epistemic'$"):
        ood_score(predictive, "confidence")


def test_unknown_or_absent_scores_are_named() -> None:
    predictive, _ = sampled()
    with pytest.raises(ValueError, match=r"'energy'.*'total' or 'epistemic' or 'confidence' or 'variance'"):
        ood_score(predictive, "energy")
    predictive.probs_variance = None
    with pytest.raises(ValueError, match="no probs_variance"):
        ood_score(predictive, "variance")


@given(SCORES, SHARES | st.just(1.0))
def test_threshold_is_the_smallest_score_that_keeps_enough(scores: list[float], keep: float) -> None:
    enough = [s for s in scores if sum(t <= s for t in scores) / len(scores) >= keep]
    threshold = Threshold.at(torch.tensor(scores, dtype=torch.float64), keep)
    assert threshold.level == min(enough)
    assert threshold.n == len(scores)
    accepted = threshold.accepts(torch.tensor(scores, dtype=torch.float64))
    assert accepted.tolist() == [s <= min(enough) for s in scores]
    assert through_json(threshold) == threshold


def test_threshold_reads_shares_as_they_are_written() -> None:
    """0.07 * 100 is 7.000000000000001 in floating point, 0.29 * 100 is 28.999999999999996."""
    scores = torch.arange(1, 101)
    assert [Threshold.at(scores, k / 100).level for k in range(1, 101)] == list(range(1, 101))


def test_threshold_agrees_with_the_roc_curve_of_scikit_learn() -> None:
    known, novel = torch.randn(200).round(decimals=1), torch.randn(200).round(decimals=1) + 1
    labels = torch.cat([torch.ones(200), torch.zeros(200)])
    # positives are in distribution and have low scores
    rates = roc_curve(labels, -torch.cat([known, novel]), drop_intermediate=False)
    for keep in (0.5, 0.8, 0.95, 1.0):
        threshold = Threshold.at(known, keep)
        first = next(i for i, true_positives in enumerate(rates[1]) if true_positives >= keep - 1e-12)
        assert threshold.level == pytest.approx(-rates[2][first])
        assert threshold.accepts(novel).double().mean().item() == pytest.approx(rates[0][first])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threshold_accepts_its_own_scores_in_any_dtype(dtype: torch.dtype) -> None:
    scores = torch.rand(3, 7).to(dtype).requires_grad_()
    threshold = Threshold.at(scores, 1.0)
    assert threshold.accepts(scores).all()
    assert threshold.accepts(scores).shape == (3, 7)
    # a level between two numbers of that dtype is not rounded to one of them
    between = Threshold(math.nextafter(1.0, 0.0), 0.9, 1)
    assert between.rejects(torch.ones(1, dtype=dtype)).all()


def test_threshold_rejects_nan_and_takes_the_only_score() -> None:
    threshold = Threshold.at(torch.tensor(0.5), 0.01)
    assert threshold.level == 0.5
    scores = torch.tensor([NAN, INF, -INF, 0.5])
    assert threshold.accepts(scores).tolist() == [False, False, True, True]
    assert threshold.rejects(scores).tolist() == [True, True, False, False]
    assert threshold.accepts(torch.zeros(0)).shape == (0,)


# --- Selective prediction

ANSWERS = st.lists(
    st.tuples(st.sampled_from([-INF, -1.0, 0.0, 0.1, 0.3, 2.0, 1e300, INF]), st.booleans()),
    min_size=1,
    max_size=14,
)


def curve_of(answers: list[tuple[float, bool]]) -> SelectiveCurve:
    return selective_curve(
        torch.tensor([s for s, _ in answers], dtype=torch.float64), torch.tensor([c for _, c in answers])
    )


@given(ANSWERS)
def test_curve_is_that_of_all_thresholds(answers: list[tuple[float, bool]]) -> None:
    curve = curve_of(answers)
    n = len(answers)
    points, area = [], Fraction(0)
    for cutoff in sorted({s for s, _ in answers}):
        kept = [c for s, c in answers if s <= cutoff]
        points.append((cutoff, len(kept) / n, sum(kept) / len(kept), len(kept)))
        area += Fraction(len(kept) - sum(kept), len(kept)) * sum(s == cutoff for s, _ in answers)
    found = list(
        zip(
            *(t.tolist() for t in (curve.cutoff, curve.coverage, curve.accuracy, curve.kept)),
            strict=True,
        )
    )
    assert found == points
    assert curve.area == pytest.approx(float(area / n), abs=1e-12)
    assert curve.accuracy_area == pytest.approx(1 - float(area / n), abs=1e-12)
    assert curve.random_area == pytest.approx(sum(not c for _, c in answers) / n)
    assert curve.n == n
    for cutoff, coverage, accuracy, kept in points:
        assert curve.at_cutoff(cutoff) == SelectivePoint(cutoff, coverage, accuracy, kept)
        assert curve.at_coverage(coverage) == SelectivePoint(cutoff, coverage, accuracy, kept)


@given(ANSWERS, st.randoms(use_true_random=False))
def test_curve_does_not_depend_on_the_order_of_inputs(answers: list[tuple[float, bool]], random: Any) -> None:
    shuffled = random.sample(answers, len(answers))
    assert curve_of(shuffled).to_dict() == curve_of(answers).to_dict()


@pytest.mark.parametrize(("right", "wrong"), [(0, 4), (4, 0), (1, 0), (0, 1), (3, 3), (4, 2)])
def test_oracle_and_random_area_are_those_of_all_orderings(right: int, wrong: int) -> None:
    flags = [True] * right + [False] * wrong
    areas = [
        curve_of([(float(i), c) for i, c in enumerate(order)]).area for order in itertools.permutations(flags)
    ]
    curve = curve_of([(0.0, c) for c in flags])
    assert curve.oracle_area == pytest.approx(min(areas), abs=1e-15)
    assert curve.random_area == pytest.approx(sum(areas) / len(areas))
    assert curve.area == pytest.approx(curve.random_area)  # a constant score knows nothing


@given(ANSWERS)
def test_no_score_beats_the_oracle(answers: list[tuple[float, bool]]) -> None:
    curve = curve_of(answers)
    assert curve.area >= curve.oracle_area - 1e-15
    assert curve.excess_area == pytest.approx(curve.area - curve.oracle_area, abs=1e-15)
    assert curve.excess_area >= 0


@given(ANSWERS, SHARES | st.just(1.0))
def test_coverage_asked_for_is_reached_with_the_smallest_cutoff(
    answers: list[tuple[float, bool]], coverage: float
) -> None:
    cutoffs = sorted({s for s, _ in answers})
    reach = [c for c in cutoffs if sum(s <= c for s, _ in answers) / len(answers) >= coverage]
    assert curve_of(answers).at_coverage(coverage).cutoff == reach[0]


def test_the_filter_experiment() -> None:
    """Accuracy and number of inputs whose entropy is below a cut-off."""
    entropy, correct = torch.rand(8, 25), torch.rand(8, 25) < 0.7
    curve = selective_curve(entropy, correct)
    for cutoff in (0.1, 0.5, 0.9):
        point = curve.at_cutoff(cutoff)
        assert point.cutoff == cutoff
        assert point.kept == (entropy <= cutoff).sum().item()
        assert point.coverage == point.kept / 200
        assert point.accuracy == pytest.approx(correct[entropy <= cutoff].double().mean().item())
    nothing = curve.at_cutoff(-1.0)
    assert (nothing.kept, nothing.coverage) == (0, 0.0)
    assert math.isnan(nothing.accuracy)
    assert nothing.to_dict()["accuracy"] is None
    assert math.isnan(through_json(nothing).accuracy)
    assert curve.at_cutoff(INF).kept == 200


def test_curve_survives_json() -> None:
    curve = selective_curve(torch.tensor([0.1, INF, -INF, 0.1]), torch.tensor([1.0, 0.0, 1.0, 0.0]))
    again = through_json(curve)
    assert again.to_dict() == curve.to_dict()
    assert again.at_cutoff(0.5) == curve.at_cutoff(0.5)
    assert curve.to_dict()["accuracy"] == pytest.approx([1.0, 2 / 3, 0.5])
    # a writer that drops the decimal point
    whole = SelectiveCurve.from_dict({"cutoff": [1, 2], "kept": [1, 2], "right": [1, 1]})
    assert whole.at_cutoff(1.5).kept == 1


# --- Conformal prediction: the promise


def repetitions(n: int, level: float) -> tuple[int, float]:
    """The rank that is promised, and the exact probability to be covered, for scores without ties."""
    rank = math.ceil((n + 1) * Fraction(str(level)))
    return rank, rank / (n + 1)


def assert_binomial(covered: Tensor, probability: float, at_least: bool = False) -> None:
    """Each repetition has calibration data and a test point of its own, so the count is exactly binomial."""
    low, high = stats.binom.interval(0.9999, covered.numel(), probability)
    assert low <= covered.sum().item()
    assert at_least or covered.sum().item() <= high


REPEATS = 10_000  # enough to tell ranks k and k - 1 apart
SETTINGS = pytest.mark.parametrize(("n", "level"), [(9, 0.9), (25, 0.9), (30, 0.8), (7, 0.3)])


@SETTINGS
@pytest.mark.parametrize("quality", ["good", "bad"])
def test_intervals_hold_the_truth_as_often_as_promised(n: int, level: float, quality: str) -> None:
    """Columns are repetitions: every output is calibrated on its own."""
    std = torch.rand(n + 1, REPEATS) + 0.1
    y = torch.randn(n + 1, REPEATS) * std
    if quality == "bad":  # neither the mean, the scale nor the shape is right
        y, std = y.exp() + 3, torch.rand(n + 1, REPEATS) * 1e-3
    mean = torch.zeros_like(y)
    conformal = ConformalIntervals.fit(Normal(mean[:n], std[:n]), y[:n], level)
    low, high = conformal.interval(Normal(mean[n:], std[n:]))
    assert_binomial((low <= y[n:]) & (y[n:] <= high), repetitions(n, level)[1])


def test_coverage_of_one_calibration_varies_as_a_beta_binomial() -> None:
    n, m, repeats = 30, 40, 4000
    y = torch.randn(n + m, repeats)
    flat = Normal(torch.zeros_like(y), torch.ones_like(y))
    conformal = ConformalIntervals.fit(Normal(flat.mean[:n], flat.std[:n]), y[:n], 0.8)
    low, high = conformal.interval(Normal(flat.mean[n:], flat.std[n:]))
    counts = ((low <= y[n:]) & (y[n:] <= high)).sum(0)
    rank, _ = repetitions(n, 0.8)
    expected = stats.betabinom.pmf(range(m + 1), m, rank, n + 1 - rank) * repeats
    first = next(i for i, e in enumerate(expected) if e >= 10)  # chi square wants no tiny classes
    observed = torch.bincount(counts, minlength=m + 1).double()
    observed = [observed[: first + 1].sum().item(), *observed[first + 1 :].tolist()]
    expected = [sum(expected[: first + 1]), *expected[first + 1 :]]
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@SETTINGS
@pytest.mark.parametrize("quality", ["good", "bad"])
@pytest.mark.parametrize("method", ["lac", "aps", "randomised"])
def test_sets_hold_the_truth_as_often_as_promised(n: int, level: float, quality: str, method: str) -> None:
    probs = torch.randn(n + 1, 4, REPEATS, dtype=torch.float64).mul(2).softmax(1)
    u = torch.rand(n + 1, 1, REPEATS, dtype=torch.float64)
    target = (probs.cumsum(1) < u).sum(1).clamp(max=3)
    if quality == "bad":  # turned round: the least probable label is the likeliest
        probs = (1 / probs) / (1 / probs).sum(1, keepdim=True)
    uniform = torch.rand(n + 1, REPEATS) if method == "randomised" else None
    known, new = (None, None) if uniform is None else (uniform[:n], uniform[n:])
    kind = "lac" if method == "lac" else "aps"
    conformal = ConformalSets.fit(probs[:n], target[:n], level, kind, known)
    covered = conformal.sets(probs[n:], new).gather(1, target[n:].unsqueeze(1))
    # plain APS has ties, at mass 1, and always the first label: it may do better than promised
    assert_binomial(covered, repetitions(n, level)[1], at_least=method == "aps")


def test_coverage_on_real_digits() -> None:
    data = load_digits()
    order = torch.randperm(len(data.target)).numpy()
    train, calibrate, test = order[:500], order[500:1000], order[1000:]
    images = data.data / 16
    model = LogisticRegression(C=0.1, max_iter=1000).fit(images[train], data.target[train])
    probs, labels = torch.tensor(model.predict_proba(images)), torch.tensor(data.target)
    rank = repetitions(len(calibrate), 0.9)[0]
    low, high = stats.betabinom.interval(0.99, len(test), rank, len(calibrate) + 1 - rank)
    sizes = {}
    for method in ("lac", "aps"):
        conformal = ConformalSets.fit(probs[calibrate], labels[calibrate], 0.9, method)
        sets = conformal.sets(probs[test])
        covered = sets.gather(1, labels[test].unsqueeze(1)).sum().item()
        assert low <= covered
        assert covered <= high or method == "aps"
        sizes[method] = conformal.size(probs[test]).double().mean().item()
    assert sizes["lac"] <= sizes["aps"] < 10  # sets say something
    temperature = Temperature.fit(probs[calibrate].log(), labels[calibrate])
    before = F.nll_loss(probs[test].log(), labels[test])
    assert temperature.value < 1  # so much weight decay makes it too modest
    assert F.nll_loss(temperature.apply(probs[test].log()), labels[test]) < before


def test_coverage_on_real_regression() -> None:
    data = load_diabetes()
    order = torch.randperm(len(data.target)).numpy()
    train, calibrate, test = order[:150], order[150:300], order[300:]
    model = BayesianRidge().fit(data.data[train], data.target[train])

    def predict(rows: Any) -> Normal:
        return Normal(*(torch.tensor(a) for a in model.predict(data.data[rows], return_std=True)))

    y = torch.tensor(data.target)
    conformal = ConformalIntervals.fit(predict(calibrate), y[calibrate], 0.9)
    low, high = conformal.interval(predict(test))
    rank = repetitions(len(calibrate), 0.9)[0]
    least, most = stats.betabinom.interval(0.99, len(test), rank, len(calibrate) + 1 - rank)
    assert least <= ((low <= y[test]) & (y[test] <= high)).sum().item() <= most


# --- Conformal prediction: the definitions


def conformal_rank(scores: list[float], level: float) -> float:
    rank = math.ceil((len(scores) + 1) * Fraction(str(level)))
    return sorted(scores)[rank - 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [0.3, 0.5, 0.7, 0.9])
def test_interval_holds_exactly_what_has_no_higher_score(dtype: torch.dtype, level: float) -> None:
    """With ties at the edge too, where rounding would put points of the very score outside."""
    mean = torch.randint(-9, 9, (60, 5)).to(dtype) / 10
    y = torch.randint(-9, 9, (60, 5)).double() / 10  # not a number of the other dtypes
    std = torch.randint(1, 9, (60, 5)).to(dtype) / 10
    conformal = ConformalIntervals.fit(Normal(mean, std), y, level)
    low, high = conformal.interval(Normal(mean, std))
    assert low.dtype == high.dtype == dtype
    for j in range(5):
        columns = zip(*(t[:, j].tolist() for t in (mean, std, y)), strict=True)
        scores = [abs(b - a) / s for a, s, b in columns]
        scale = conformal_rank(scores, level)
        assert conformal.scale[j].item() == pytest.approx(scale, rel=1e-12)
        inside = (low[:, j] <= y[:, j]) & (y[:, j] <= high[:, j])
        for score, held in zip(scores, inside.tolist(), strict=True):
            if score <= scale:
                assert held
            elif score > scale * (1 + 8 * torch.finfo(dtype).eps) + 20 * torch.finfo(dtype).eps:
                assert not held
    width = conformal.scale.to(dtype) * std
    tolerance = 6 * torch.finfo(dtype).eps * float(width.max() + 1)
    assert torch.allclose(high - mean, width, atol=tolerance)
    assert torch.allclose(mean - low, width, atol=tolerance)


def test_a_claim_of_certainty_is_taken_at_its_word() -> None:
    zeros = torch.zeros(10)
    y = zeros.clone()
    y[0] = 1e-30  # one false claim in ten
    conformal = ConformalIntervals.fit(Normal(zeros, zeros), y, 0.8)
    low, high = conformal.interval(Normal(torch.ones(1), zeros[:1]))
    assert conformal.scale == 0
    assert low.item() == pytest.approx(1, abs=1e-6)
    assert low <= 1 <= high
    with pytest.warns(UserWarning, match="std 0 and a wrong mean"):
        conformal = ConformalIntervals.fit(Normal(zeros, zeros), y, 0.9)
    assert [t.item() for t in conformal.interval(Normal(zeros[:1], zeros[:1]))] == [-INF, INF]
    assert through_json(conformal).scale == INF


def test_too_few_points_promise_nothing_finite() -> None:
    """Level 0.9 needs 9 points: with 8, a new point has the highest score in 1 of 9 cases."""
    predictive = Normal(torch.zeros(9), torch.ones(9))
    assert ConformalIntervals.fit(predictive, torch.arange(9.0), 0.9).scale == 8
    for n in (1, 8):
        few = Normal(torch.zeros(n), torch.ones(n))
        with pytest.warns(UserWarning, match=rf"{n} calibration point.*at least 9$") as caught:
            conformal = ConformalIntervals.fit(few, torch.arange(float(n)), 0.9)
        assert caught[0].filename == __file__
        assert [t.tolist() for t in conformal.interval(few)] == [[-INF] * n, [INF] * n]
        with pytest.warns(UserWarning, match="every set has all labels"):
            sets = ConformalSets.fit(torch.eye(3)[[0] * n], torch.zeros(n, dtype=torch.int64), 0.9)
        assert sets.sets(torch.eye(3)).all()
    assert ConformalIntervals.fit(Normal(torch.zeros(1), torch.ones(1)), torch.ones(1), 0.5).scale == 1


def test_intervals_have_one_scale_per_output_and_survive_json() -> None:
    mean, std = torch.randn(20, 2, 3), torch.rand(20, 2, 3)
    y = torch.randn(20, 2, 3)
    conformal = ConformalIntervals.fit(Normal(mean, std), y, 0.8)
    alone = ConformalIntervals.fit(Normal(mean[:, 1, 2], std[:, 1, 2]), y[:, 1, 2], 0.8)
    assert conformal.scale.shape == (2, 3)
    assert conformal.scale[1, 2] == alone.scale
    again = through_json(conformal)
    for a, b in zip(again.interval(Normal(mean, std)), conformal.interval(Normal(mean, std)), strict=True):
        assert torch.equal(a, b)
    low, high = conformal.interval(Normal(torch.full((1, 2, 3), NAN), std[:1]))
    assert low.isnan().all()
    assert high.isnan().all()
    assert conformal.interval(Normal(mean[:0], std[:0]))[0].shape == (0, 2, 3)


def score_by_hand(row: list[float], label: int, method: str, u: float = 1.0) -> float:
    if method == "lac":
        return 1 - row[label]
    above = sum(p for p in row if p > row[label])
    tied = sum(p for p in row if p == row[label])
    rank = len(
        {p for p in row if p > row[label]}
    )  # settles equal masses: a label of probability 0 comes later
    return above + u * tied + rank * 2.0**-52


# Multiples of 1/8, so that sums are exact and ties common.
ROWS = st.lists(
    st.lists(st.integers(1, 8), min_size=3, max_size=3, unique=True).map(
        lambda cuts: [(b - a) / 8 for a, b in itertools.pairwise([0, *sorted(cuts[:2]), 8])]
    ),
    min_size=2,
    max_size=9,
)


@given(ROWS, st.data(), st.sampled_from(["lac", "aps", "randomised"]))
def test_sets_hold_exactly_what_has_no_higher_score(rows: list[list[float]], data: Any, method: str) -> None:
    n = len(rows)
    labels = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    shares = [1.0] * n
    uniform = None
    if method == "randomised":
        shares = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=n, max_size=n))
        uniform = torch.tensor(shares)
    kind = "lac" if method == "lac" else "aps"
    probs = torch.tensor(rows)
    conformal = ConformalSets.fit(probs, torch.tensor(labels), 0.6, kind, uniform)
    scores = [score_by_hand(r, y, kind, u) for r, y, u in zip(rows, labels, shares, strict=True)]
    cutoff = conformal_rank(scores, 0.6)
    assert conformal.cutoff.item() == cutoff
    expected = [
        [score_by_hand(r, k, kind, u) <= cutoff or (method == "aps" and r[k] == max(r)) for k in range(3)]
        for r, u in zip(rows, shares, strict=True)
    ]
    assert conformal.sets(probs, uniform).tolist() == expected
    assert through_json(conformal).sets(probs, uniform).tolist() == expected
    assert conformal.size(probs, uniform).tolist() == [sum(e) for e in expected]


@pytest.mark.parametrize("method", ["lac", "aps"])
def test_sets_do_not_depend_on_the_order_of_classes(method: str) -> None:
    probs = torch.randn(40, 10).mul(3).round().softmax(1)  # with ties
    target = torch.randint(10, (40,))
    order = torch.randperm(10)
    inverse = order.argsort()
    plain = ConformalSets.fit(probs, target, 0.8, method).sets(probs)
    moved = ConformalSets.fit(probs[:, order], inverse[target], 0.8, method).sets(probs[:, order])
    assert torch.equal(plain[:, order], moved)


@pytest.mark.parametrize("method", ["lac", "aps"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sets_in_any_dtype_and_with_positions(method: str, dtype: torch.dtype) -> None:
    probs = torch.randn(30, 5, 2, 3).mul(2).softmax(1).to(dtype)
    target = torch.randint(5, (30, 2, 3), dtype=torch.uint8)
    conformal = ConformalSets.fit(probs, target, 0.7, method)
    sets = conformal.sets(probs)
    assert sets.shape == probs.shape
    assert sets.dtype == torch.bool
    assert conformal.size(probs).shape == (30, 2, 3)
    for i, j in itertools.product(range(2), range(3)):
        alone = ConformalSets.fit(probs[..., i, j], target[:, i, j], 0.7, method)
        assert torch.equal(alone.sets(probs[..., i, j]), sets[..., i, j])
    # at least the promised rank of the calibration labels themselves, rounding or not
    inside = sets.gather(1, target.long().unsqueeze(1)).sum(0)
    assert inside.min() >= math.ceil(31 * 0.7)
    assert conformal.sets(probs[:0]).shape == (0, 5, 2, 3)


@pytest.mark.parametrize("method", ["lac", "aps"])
def test_sets_at_the_extremes(method: str) -> None:
    one_class = ConformalSets.fit(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64), 0.5, method)
    assert one_class.sets(torch.ones(2, 1)).all()
    certain = ConformalSets.fit(torch.eye(3), torch.arange(3), 0.5, method)  # always right, always sure
    assert certain.sets(torch.eye(3)).tolist() == torch.eye(3).bool().tolist()
    wrong = ConformalSets.fit(torch.eye(3), torch.tensor([1, 2, 0]), 0.5, method)  # never
    assert wrong.sets(torch.eye(3)).all()
    probs = torch.randn(50, 3).softmax(1)
    last = ConformalSets.fit(probs, probs.argmin(1), 0.5, "aps")
    assert last.sets(probs).all()  # all masses of the last label are 1, however the sum is rounded
    row = torch.tensor([[NAN, 0.5, 0.5]])
    assert certain.sets(row).all()  # nothing is known, so nothing is excluded
    many = torch.full((20, 1000), 1e-3)
    uniform = ConformalSets.fit(many, torch.zeros(20, dtype=torch.int64), 0.9, method)
    assert uniform.sets(many).all()  # all labels are equal


# --- Temperature


def nll(log_probs: Tensor, target: Tensor, temperature: float) -> float:
    scaled = (log_probs.double() / temperature).log_softmax(1)
    return F.nll_loss(scaled, target).item()


@pytest.mark.parametrize("true", [0.05, 0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("classes", [2, 10])
def test_temperature_minimises_the_likelihood(true: float, classes: int) -> None:
    logits = torch.randn(500, classes, dtype=torch.float64) * 2
    target = torch.distributions.Categorical(logits=logits).sample()
    log_probs = (logits * true).log_softmax(1)  # too sure by `true`
    found = Temperature.fit(log_probs, target).value
    search = optimize.minimize_scalar(
        lambda log: nll(log_probs, target, math.exp(log)),
        bounds=(math.log(0.01), math.log(100)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert found == pytest.approx(math.exp(search.x), rel=1e-5)
    assert nll(log_probs, target, found) <= search.fun + 1e-12
    grid = torch.logspace(-2, 2, 200).tolist()
    assert nll(log_probs, target, found) <= min(nll(log_probs, target, t) for t in grid)
    assert found == pytest.approx(true, rel=0.3)


@given(st.integers(0, 10_000), st.floats(-3, 4), st.integers(1, 6), st.integers(1, 4))
def test_slope_is_zero_at_the_temperature_or_points_out(
    seed: int, scale: float, n: int, classes: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, classes, generator=generator, dtype=torch.float64) * 10**scale
    target = torch.randint(classes, (n,), generator=generator)
    found = Temperature.fit(values, target).value
    beta = torch.tensor(1 / found, dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(values * beta, target)
    (slope,) = torch.autograd.grad(loss, beta)
    tolerance = 1e-12 * max(1.0, values.abs().max().item())
    if found == 0.01:
        assert slope <= tolerance
    elif found == 100:
        assert slope >= -tolerance
    else:
        assert abs(slope) <= tolerance


def test_temperature_is_bounded_where_there_is_no_minimum() -> None:
    log_probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
    assert Temperature.fit(log_probs, torch.tensor([0, 1])).value == 0.01  # separable
    assert Temperature.fit(log_probs, torch.tensor([1, 0])).value == 100  # always wrong
    for flat in (torch.zeros(3, 4), torch.zeros(3, 1), torch.full((3, 4), 0.25).log()):
        assert Temperature.fit(flat, torch.zeros(3, dtype=torch.int64)).value == 1  # no difference
    assert Temperature.fit(log_probs[:1], torch.tensor([0])).value == 0.01
    far = torch.tensor([[0.0, -10.0], [-10.0, 0.0]])  # the slope underflows before the bound
    assert Temperature.fit(far, torch.tensor([0, 1])).value == 0.01
    extreme = torch.tensor([[0.0, -1e300], [-1e300, 0.0], [0.0, -1e30]])
    assert Temperature.fit(extreme.double(), torch.tensor([0, 1, 1])).value == 100


def test_temperature_is_found_where_newton_alone_crawls() -> None:
    """The slope is 0.5e-250 - 10 exp(-10 / T), halved: from T = 1 Newton needs 570 steps."""
    log_probs = torch.tensor([[0.0, -10.0], [0.0, -1e-250]], dtype=torch.float64)
    found = Temperature.fit(log_probs, torch.tensor([0, 1])).value
    assert found == pytest.approx(10 / (250 * math.log(10) + math.log(20)), rel=1e-9)


def test_impossible_labels_stay_impossible() -> None:
    log_probs = torch.tensor([[0.8, 0.2, 0.0], [0.6, 0.4, 0.0], [0.7, 0.3, 0.0]]).log()
    target = torch.tensor([0, 1, 0])
    both = Temperature.fit(log_probs, target)
    assert both.value == pytest.approx(Temperature.fit(log_probs[:, :2], target).value)
    scaled = both.apply(log_probs).exp()
    assert torch.equal(scaled[:, 2], torch.zeros(3))
    assert torch.allclose(scaled.sum(1), torch.ones(3))
    with pytest.raises(ValueError, match="1 target\\(s\\) have probability 0"):
        Temperature.fit(log_probs, torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_temperature_applies_in_any_dtype_and_lets_gradients_through(dtype: torch.dtype) -> None:
    log_probs = torch.randn(6, 3, 2).log_softmax(1).to(dtype).requires_grad_()
    temperature = Temperature(2.0)
    scaled = temperature.apply(log_probs)
    assert scaled.dtype == dtype
    expected = log_probs.double().exp().sqrt()
    expected = expected / expected.sum(1, keepdim=True)
    assert torch.allclose(scaled.double().exp(), expected, atol=4 * torch.finfo(dtype).eps)
    scaled[:, 0].sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.abs().sum() > 0
    target = torch.randint(3, (6, 2))
    wide = Temperature.fit(log_probs.double(), target)
    assert Temperature.fit(log_probs, target) == wide
    assert through_json(wide) == wide
    assert torch.equal(scaled.argmax(1), log_probs.argmax(1))


# --- Bad input

GOOD = torch.full((4, 2), 0.5)
LABELS = torch.tensor([0, 1, 1, 0])
FLAT = Normal(torch.zeros(4), torch.ones(4))


def intervals() -> ConformalIntervals:
    return ConformalIntervals.fit(FLAT, torch.ones(4), 0.5)


def label_sets(**settings: Any) -> ConformalSets:
    return ConformalSets.fit(GOOD, LABELS, 0.5, **settings)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "threshold of nothing": (lambda: Threshold.at(torch.zeros(0)), "scores is empty"),
    "threshold of nan": (lambda: Threshold.at(torch.tensor([1, NAN])), "1 of 2 values in scores are NaN"),
    "keep 0": (lambda: Threshold.at(torch.ones(2), 0.0), r"keep=0.0 must lie in \(0, 1\]"),
    "keep 95": (lambda: Threshold.at(torch.ones(2), 95), r"keep=95 must lie in \(0, 1\]"),
    "keep nan": (lambda: Threshold.at(torch.ones(2), NAN), "keep=nan"),
    "level nan": (lambda: Threshold(NAN, 0.9, 1), "level is NaN"),
    "curve of nothing": (lambda: selective_curve(torch.zeros(0), torch.zeros(0)), "score is empty"),
    "curve of nan": (lambda: selective_curve(torch.tensor([NAN]), torch.ones(1)), "values in score are NaN"),
    "curve shapes": (lambda: selective_curve(torch.ones(2), torch.ones(2, 1)), r"\[2\] and correct \[2, 1\]"),
    "curve of labels": (lambda: selective_curve(torch.ones(2), torch.tensor([0, 7])), "correct must be bool"),
    "curve of maybe": (lambda: selective_curve(torch.ones(1), torch.tensor([NAN])), "correct must be bool"),
    "coverage": (lambda: curve_of([(0.0, True)]).at_coverage(0), r"coverage=0 must lie in \(0, 1\]"),
    "cut-off": (lambda: curve_of([(0.0, True)]).at_cutoff(NAN), "cut-off is NaN"),
    "curve pieces": (lambda: SelectiveCurve(torch.ones(2), torch.ones(1), torch.ones(2)), "one length"),
    "level 1": (lambda: ConformalIntervals.fit(FLAT, torch.ones(4), 1.0), r"level=1.0 must lie in \(0, 1\)"),
    "level 0": (lambda: ConformalSets.fit(GOOD, LABELS, 0), r"level=0 must lie in \(0, 1\)"),
    "y as a column": (lambda: ConformalIntervals.fit(FLAT, torch.ones(4, 1)), r"\[4\], \[4\], \[4, 1\]"),
    "y nan": (lambda: ConformalIntervals.fit(FLAT, torch.full((4,), NAN)), "4 of 4 values in y"),
    "y scalar": (
        lambda: ConformalIntervals.fit(Normal(torch.ones(()), torch.ones(())), torch.ones(())),
        r"\[\], \[\], \[\]; all must be",
    ),
    "mean infinite": (
        lambda: ConformalIntervals.fit(Normal(torch.full((4,), INF), FLAT.std), torch.ones(4)),
        "values in mean are NaN or infinite",
    ),
    "std negative": (
        lambda: ConformalIntervals.fit(Normal(FLAT.mean, -FLAT.std), torch.ones(4)),
        "std has negative values",
    ),
    "no data": (
        lambda: ConformalIntervals.fit(Normal(torch.zeros(0), torch.zeros(0)), torch.zeros(0)),
        "mean is empty",
    ),
    "interval shape": (
        lambda: intervals().interval(Normal(torch.zeros(4, 2), torch.ones(4, 2))),
        r"fitted for \['n'\]",
    ),
    "logits": (lambda: ConformalSets.fit(GOOD * 3, LABELS), "take softmax"),
    "negative": (lambda: ConformalSets.fit(torch.tensor([[1.5, -0.5]]), LABELS[:1]), "0 or larger"),
    "probs nan": (lambda: ConformalSets.fit(GOOD * NAN, LABELS), "probs has NaN"),
    "one dimension": (lambda: ConformalSets.fit(GOOD[0], LABELS), r"float32 \[2\]"),
    "no inputs": (lambda: ConformalSets.fit(GOOD[:0], LABELS[:0]), r"float32 \[0, 2\]"),
    "no classes": (lambda: ConformalSets.fit(torch.ones(2, 0), LABELS[:2]), r"float32 \[2, 0\]"),
    "label 2": (lambda: ConformalSets.fit(GOOD, LABELS * 2), "labels 0 to 2, classes are 0 to 1"),
    "label -1": (lambda: ConformalSets.fit(GOOD, LABELS - 1), "labels -1 to 0"),
    "label floats": (lambda: ConformalSets.fit(GOOD, LABELS.float()), r"float32 \[4\]; give integer"),
    "label shape": (lambda: ConformalSets.fit(GOOD, LABELS[:3]), r"int64 \[3\]; give integer labels \[4\]"),
    "method": (lambda: label_sets(method="raps"), "method='raps'.*choose 'lac' or 'aps'"),
    "lac at random": (lambda: label_sets(uniform=torch.rand(4)), "'lac' is not randomised"),
    "uniform shape": (lambda: label_sets(method="aps", uniform=torch.rand(3)), r"\[0, 1\] of shape \[4\]"),
    "uniform range": (lambda: label_sets(method="aps", uniform=torch.ones(4) * 2), "numbers in"),
    "uniform missing": (lambda: label_sets(method="aps", uniform=torch.rand(4)).sets(GOOD), "needs uniform"),
    "uniform unasked": (lambda: label_sets().sets(GOOD, torch.rand(4)), "takes no uniform"),
    "set classes": (lambda: label_sets().sets(torch.ones(4, 1)), r"fitted for \['n', 2\]"),
    "set logits": (lambda: label_sets().sets(GOOD * 9), "take softmax"),
    "temperature nan": (lambda: Temperature.fit(GOOD * NAN, LABELS), "values in log_probs are NaN"),
    "temperature empty": (lambda: Temperature.fit(GOOD[:0], LABELS[:0]), "log_probs is empty"),
    "temperature inf": (lambda: Temperature.fit(GOOD * INF, LABELS), r"\+inf"),
    "temperature rows": (lambda: Temperature.fit(GOOD * -INF, LABELS), "rows of -inf"),
    "temperature label": (lambda: Temperature.fit(GOOD.log(), LABELS + 5), "labels 5 to 6"),
    "temperature shape": (lambda: Temperature.fit(GOOD[0], LABELS), r"float32 \[2\]"),
    "temperature integers": (lambda: Temperature(1.0).apply(torch.ones(2, 2).long()), r"int64 \[2, 2\]"),
    "temperature 0": (lambda: Temperature(0.0), "positive and finite"),
    "dictionary": (lambda: Threshold.from_dict({"n": 1}), "lacks level, keep;"),
    "dictionary level": (
        lambda: ConformalIntervals.from_dict({"level": 2, "n": 1, "scale": 1.0}),
        "level=2.0 must lie",
    ),
    "dictionary method": (
        lambda: ConformalSets.from_dict(label_sets().to_dict() | {"method": "x"}),
        "method='x'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_and_what_next(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
