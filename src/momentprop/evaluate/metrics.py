"""Measures how good predictions and their uncertainties are: every number with its interval.

Predictions are what `classify` and `regress` give, or tensors: class probabilities [batch, K, ...] with
targets [batch, ...], as in F.cross_entropy, and tensors of one shape for a regression. Everything is computed
in float64 on the CPU.

Intervals: the rows (first dimension) are independent observations; what stands in one row, such as the
pixels of one image, may depend on each other and does not narrow the interval as if it did not. Rates have
Wilson's interval, means the normal one of their standard error, a correlation Fisher's, AUROC DeLong's;
the others the bootstrap.

Scores of novelty are higher for novel inputs, and novel inputs are the positives: the true positive rate is
the fraction of novel inputs found, the false positive rate the fraction of known inputs flagged. Some of the
literature calls the known inputs positive; AUPR and FPR at a given TPR differ between the two, AUROC does
not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from momentprop.evaluate.estimates import (
    Estimate,
    bootstrap,
    check_numbers,
    check_ordered,
    mean_estimate,
    normal_quantile,
    numbers,
    pearson,
    percentiles,
    rate_estimate,
    resampled,
    wilson,
)
from momentprop.predict.class_predictive import Probabilities, log_probs_of, probs_of
from momentprop.predict.regression_predictive import RegressionPredictive

__all__ = [
    "Estimate",
    "accuracy",
    "aupr",
    "auroc",
    "bootstrap",
    "brier",
    "coverage",
    "crps_gaussian",
    "ece",
    "fpr_at_tpr",
    "gaussian_nll",
    "nll",
    "pearson",
    "reliability",
    "rmse",
    "roc",
    "width",
    "wilson",
]

_BELOW_ONE = 1 - 2.0**-53  # the largest float64 below 1


# -------------------------------------------------------------------------------------- classification


def accuracy(probs: Probabilities, target: Tensor, *, level: float = 0.95) -> Estimate:
    """The rate at which the most probable class is the target.

    >>> print(accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]), torch.tensor([0, 1, 1])))
    0.667 (0.208..0.939)
    """
    probs, target = _classes(probs, target)
    return rate_estimate(probs.argmax(1) == target, level)


def nll(predicted: Probabilities | RegressionPredictive, target: Tensor, *, level: float = 0.95) -> Estimate:
    """Mean negative log-likelihood, in nats, of a predictive distribution.

    It may also be a tensor of probabilities or log-probabilities; values of which none is negative are taken
    for probabilities. A target of probability zero costs infinity, and then the interval is infinity too.

    >>> print(nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])))
    0.490 (0.093..0.888)
    """
    if isinstance(predicted, RegressionPredictive):
        (losses,) = numbers(finite=False, nll=predicted.nll(target))
        return mean_estimate(losses, level)
    values = log_probs_of(predicted)
    is_log = values is not predicted or bool((values < 0).any()) or not bool((values > 0).any())
    values, target = _classes(values, target, is_log=is_log)
    chosen = values.gather(1, target.unsqueeze(1)).squeeze(1)
    # rounding may leave a probability of 1 + 1e-7
    return mean_estimate(-(chosen if is_log else chosen.log()).clamp_max(0), level, least=0.0)


def brier(probs: Probabilities, target: Tensor, *, level: float = 0.95) -> Estimate:
    """Brier's (1950) score: the mean of sum_k (p_k - [k = target])^2, from 0 (perfect) to 2.

    With two classes this is twice the score of one class's probability.

    >>> print(brier(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])))
    0.312 (0.000..0.680)
    """
    probs, target = _classes(probs, target)
    truth = torch.zeros_like(probs).scatter_(1, target.unsqueeze(1), 1.0)
    return mean_estimate((probs - truth).square().sum(1), level, least=0.0, most=2.0)


def ece(
    probs: Probabilities,
    target: Tensor,
    n_bins: int = 15,
    *,
    n_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Expected calibration error (Naeini et al. 2015): the mean over bins of |accuracy - confidence|.

    The bins are those of `reliability`. The value is too large on average, by the chance differences within
    bins, and a resample has those twice: near perfect calibration the percentile interval hardly ever
    contains the truth. So the low end is that of the interval reflected about the value ("basic"), which
    takes the excess off; and it is 0 where predictions of the same confidences that are calibrated by
    construction (Bröcker & Smith 2007; every element apart) reach the value by chance.

    >>> probs = torch.tensor([[0.8, 0.2]]).expand(10, 2)
    >>> round(ece(probs, torch.tensor([0] * 6 + [1] * 4)).value, 6)  # 0.8 sure, 0.6 right
    0.2
    """

    def statistic(confidence: Tensor, correct: Tensor) -> Tensor:
        sure, right, count = _binned(confidence, correct, n_bins)
        return (right - sure).abs().sum() / count.sum()

    confidence, correct = _top(probs, target, n_bins)
    value = float(statistic(confidence, correct))
    low, high = percentiles(resampled(statistic, [(confidence, correct)], n_resamples, seed), level)
    generator = torch.Generator().manual_seed(seed)
    uniform = (torch.rand(confidence.shape, generator=generator).double() for _ in range(n_resamples))
    calibrated = [float(statistic(confidence, (u < confidence).long())) for u in uniform]
    by_chance = value <= percentiles(torch.tensor(calibrated, dtype=torch.float64), level)[1]
    least = 0.0 if by_chance else max(0.0, 2 * value - high)
    return Estimate(value, least, max(high, 2 * value - low), level)


def reliability(probs: Probabilities, target: Tensor, n_bins: int = 15) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `ece` sums: mean confidence, accuracy, number of inputs of each bin; NaN if empty.

    Bin i of n holds the confidences i/n <= c < (i+1)/n, the last one also 1.

    >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6]])
    >>> [values.tolist() for values in reliability(probs, torch.tensor([0, 1, 1]), n_bins=2)]
    [[nan, 0.7333333492279053], [nan, 0.6666666666666666], [0.0, 3.0]]
    """
    sure, right, count = _binned(*_top(probs, target, n_bins), n_bins)
    return sure / count, right / count, count


# ------------------------------------------------------------------------------------------ regression


def rmse(
    prediction: Tensor | RegressionPredictive,
    y: Tensor,
    *,
    n_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Root of the mean squared error, with the bootstrap's interval.

    >>> rmse(torch.tensor([3.0, 2.0]), torch.tensor([1.0, 4.0])).value
    2.0
    """
    mean = prediction.mean if isinstance(prediction, RegressionPredictive) else prediction
    mean, y = numbers(prediction=mean, y=y)
    squared = (mean - y).square()
    return bootstrap(lambda e: e.mean().sqrt(), squared, n_resamples=n_resamples, level=level, seed=seed)


def gaussian_nll(mean: Tensor, std: Tensor, y: Tensor, *, level: float = 0.95) -> Estimate:
    """Mean of -log N(y; mean, std^2), in nats.

    >>> print(gaussian_nll(torch.zeros(3), torch.ones(3), torch.zeros(3)))  # log(2 pi) / 2
    0.919 (0.919..0.919)
    """
    mean, std, y = numbers(mean=mean, std=std, y=y)
    if (std <= 0).any():
        raise ValueError(f"std must be positive; the smallest is {std.min().item():g}")
    return mean_estimate(0.5 * math.log(2 * math.pi) + std.log() + 0.5 * ((y - mean) / std).square(), level)


def crps_gaussian(mean: Tensor, std: Tensor, y: Tensor, *, level: float = 0.95) -> Estimate:
    """Mean continuous ranked probability score of N(mean, std^2), in the units of y.

    The integral of (F(x) - [x >= y])^2; with d = y - mean and z = d / std (Gneiting et al. 2005)

        d (2 Phi(z) - 1) + std (2 phi(z) - 1 / sqrt(pi)),

    which is |d| at std = 0.

    >>> print(crps_gaussian(torch.zeros(3), torch.zeros(3), torch.full((3,), -2.0)))
    2.000 (2.000..2.000)
    """
    mean, std, y = numbers(mean=mean, std=std, y=y)
    if (std < 0).any():
        raise ValueError(f"std must not be negative; the smallest is {std.min().item():g}")
    d = (y - mean).abs()
    z = torch.where(d == 0, 0.0, d / std)  # d / 0 is infinite, and erf and exp take that to their limits
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    # d erf, not std (z erf): z may be infinite
    score = d * torch.erf(z / math.sqrt(2)) + std * (2 * density - 1 / math.sqrt(math.pi))
    return mean_estimate(score, level, least=0.0)


def coverage(low: Tensor, high: Tensor, y: Tensor, *, level: float = 0.95) -> Estimate:
    """The rate of low <= y <= high. Ends may be infinite.

    >>> print(coverage(torch.zeros(4), torch.ones(4), torch.tensor([0.0, 0.5, 1.0, 1.5])))
    0.750 (0.301..0.954)
    """
    low, high, y = numbers(finite=False, low=low, high=high, y=y)
    check_ordered(low, high)
    return rate_estimate((low <= y) & (y <= high), level)


def width(low: Tensor, high: Tensor, *, level: float = 0.95) -> Estimate:
    """The mean of high - low. Ends may be infinite.

    >>> print(width(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])))
    2.000 (0.868..3.132)
    """
    low, high = numbers(finite=False, low=low, high=high)
    check_ordered(low, high)
    return mean_estimate(torch.where(low == high, 0.0, high - low), level, least=0.0)


# --------------------------------------------------------------------------------------------- novelty


def auroc(known: Tensor, novel: Tensor, *, level: float = 0.95) -> Estimate:
    """Area under the ROC curve: the chance that a novel input scores above a known one, ties half.

    With the variance of DeLong et al. (1988) on the logit scale, so that the interval
    stays inside 0..1. Perfect separation leaves no variance; then Wilson's interval of as many independent
    pairs as there are is taken.

    >>> print(auroc(torch.arange(0.0, 20.0), torch.arange(15.0, 35.0)))
    0.969 (0.889..0.992)
    """
    known, novel = _scores(known, novel)
    z, pairs = normal_quantile(level), min(len(known), len(novel))
    # the fraction of known inputs below each novel one, and of novel inputs above each known one
    below, above = _fraction_below(known, novel), 1 - _fraction_below(novel, known)
    value = below.mean().item()
    variance = (below.var() / len(novel) + above.var() / len(known)).item() if pairs > 1 else 0.0
    if variance == 0 or value in (0.0, 1.0):
        interval = wilson(value * pairs, pairs, level)
        return Estimate(value, interval.low, interval.high, level)
    logit, half = math.log(value / (1 - value)), z * math.sqrt(variance) / (value * (1 - value))
    low, high = torch.tensor([logit - half, logit + half], dtype=torch.float64).sigmoid().tolist()
    return Estimate(value, low, high, level)


def aupr(
    known: Tensor, novel: Tensor, *, n_resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Estimate:
    """Area under the precision-recall curve (average precision) of finding the novel inputs.

    The sum over thresholds of precision times the step in recall, with the bootstrap over known and novel
    inputs apart (seconds, for tens of thousands of inputs). It depends on the share of novel inputs: compare
    it only between methods on the same inputs. Perfect separation has an interval of width zero.

    >>> aupr(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4])).value
    1.0
    """
    known, novel = _scores(known, novel)

    def statistic(known: Tensor, novel: Tensor) -> Tensor:
        flagged, found = _flagged(known, novel)
        return (found.diff(prepend=found.new_zeros(1)) * found / (found + flagged)).sum() / len(novel)

    samples = resampled(statistic, [(known,), (novel,)], n_resamples, seed)
    return Estimate(float(statistic(known, novel)), *percentiles(samples, level), level)


def roc(known: Tensor, novel: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the ROC curve: rates of known inputs flagged and of novel ones found, at ever lower thresholds.

    >>> [rates.tolist() for rates in roc(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))]
    [[0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0]]
    """
    known, novel = _scores(known, novel)
    flagged, found = (torch.cat([n.new_zeros(1), n]) for n in _flagged(known, novel))
    return flagged / len(known), found / len(novel)


def fpr_at_tpr(
    known: Tensor,
    novel: Tensor,
    tpr: float = 0.95,
    *,
    n_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """The rate of known inputs flagged at the highest threshold that finds the share `tpr` of the novel ones.

    The interval is the bootstrap's over known and novel inputs apart, and at least Wilson's for the
    threshold as it is.

    >>> print(fpr_at_tpr(torch.arange(0.0, 100.0), torch.arange(80.0, 180.0)))
    0.150 (0.060..0.233)
    """
    known, novel = _scores(known, novel)
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr must be above 0 and at most 1, not {tpr}")
    rank = len(novel) - math.ceil(tpr * len(novel) - 1e-9)  # 1e-9: 0.07 * 100 is above 7

    def statistic(known: Tensor, novel: Tensor) -> Tensor:
        return (known >= novel.kthvalue(rank + 1).values).double().mean()

    value = float(statistic(known, novel))
    low, high = percentiles(resampled(statistic, [(known,), (novel,)], n_resamples, seed), level)
    floor = wilson(value * len(known), len(known), level)
    return Estimate(value, min(low, floor.low), max(high, floor.high), level)


def _scores(known: Tensor, novel: Tensor) -> tuple[Tensor, Tensor]:
    for name, scores in (("known", known), ("novel", novel)):
        check_numbers(name, scores, finite=True)
        if scores.ndim != 1:
            raise ValueError(f"{name} must be one score per input, [n], not {list(scores.shape)}")
    return known.detach().to("cpu", torch.float64), novel.detach().to("cpu", torch.float64)


def _flagged(known: Tensor, novel: Tensor) -> tuple[Tensor, Tensor]:
    """Count the known and the novel inputs at or above each score, from the highest down."""
    scores, order = torch.cat([known, novel]).sort(descending=True)
    found = (order >= len(known)).double().cumsum(0)
    flagged = (order < len(known)).double().cumsum(0)
    last = scores.diff(append=scores.new_full((1,), -math.inf)) != 0  # of inputs with the same score
    return flagged[last], found[last]


def _fraction_below(values: Tensor, points: Tensor) -> Tensor:
    """Return for each point the fraction of the values below it; ties count half."""
    ordered = values.sort().values
    below = torch.searchsorted(ordered, points) + torch.searchsorted(ordered, points, right=True)
    return below.double() / (2 * len(values))


def _classes(probs: Probabilities, target: Tensor, *, is_log: bool = False) -> tuple[Tensor, Tensor]:
    """Probabilities [batch, K, ...] in float64 and targets [batch, ...] in int64, checked."""
    probs = probs_of(probs)
    if probs.ndim < 2 or target.shape != probs.shape[:1] + probs.shape[2:]:
        raise ValueError(
            f"probabilities [batch, K, ...] and targets [batch, ...] are needed, "
            f"not {list(probs.shape)} and {list(target.shape)}"
        )
    check_numbers("target", target, finite=True)
    check_numbers("probs", probs, finite=not is_log)
    if target.is_floating_point() or target.is_complex():
        raise ValueError(f"targets must be integers, not {target.dtype}")
    # half precision sums to one less well
    tolerance = max(1e-3, torch.finfo(probs.dtype).eps ** 0.5) if probs.is_floating_point() else 1e-3
    probs, target = probs.detach().to("cpu", torch.float64), target.detach().to("cpu", torch.int64)
    n_classes = probs.shape[1]
    if target.min() < 0 or target.max() >= n_classes:
        raise ValueError(
            f"targets must be within 0..{n_classes - 1}; "
            f"they reach from {int(target.min())} to {int(target.max())}"
        )
    total = (probs.exp() if is_log else probs).sum(1)
    worst = total.flatten()[(total - 1).abs().argmax()].item()
    if abs(worst - 1) > tolerance or (not is_log and (probs < 0).any()):
        what = "log-probabilities" if is_log else "probabilities"
        raise ValueError(
            f"these are no {what} over dimension 1: one sum is {worst:g}, "
            f"the smallest value {probs.min().item():g}; "
            "apply softmax to logits, and average probabilities, not their logarithms"
        )
    return probs, target


def _top(probs: Probabilities, target: Tensor, n_bins: int) -> tuple[Tensor, Tensor]:
    """Confidence of the most probable class, and whether it is right."""
    if n_bins < 1:
        raise ValueError(f"n_bins must be at least 1, not {n_bins}")
    probs, target = _classes(probs, target)
    confidence, choice = probs.max(1)
    return confidence.clamp_max(_BELOW_ONE), (choice == target).long()  # 1 belongs to the last bin


def _binned(confidence: Tensor, correct: Tensor, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sum confidences and hits, and count elements, in each bin."""
    # i/n by multiplication would put some values into another bin
    edges = torch.linspace(0, 1, n_bins + 1, dtype=torch.float64)
    confidence, correct = confidence.flatten(), correct.flatten().double()
    index = torch.bucketize(confidence, edges, right=True) - 1
    count = torch.bincount(index, minlength=n_bins).double()
    return torch.bincount(index, confidence, n_bins), torch.bincount(index, correct, n_bins), count
