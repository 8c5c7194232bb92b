"""Makes decisions from a predictive distribution: flag, abstain, cover, calibrate.

- `ood_score` and `Threshold`: is this input unlike those the network was trained on?
- `selective_curve`: how accurate are the answers if the doubtful ones are withheld?
- `ConformalIntervals`, `ConformalSets`: intervals and label sets that hold the truth as often as promised,
  however bad the predictive distribution is.
- `Temperature`: probabilities made neither too sure nor too modest.

All are chosen on held-out data, in float64 (on the CPU where a device has no float64), and nothing is
random. `to_dict` gives plain JSON, infinity written as the string "inf"; `from_dict` reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from momentprop.predict.checks import check_choice, check_share, check_values, double, rank_of
from momentprop.predict.conformal import ConformalIntervals, ConformalSets
from momentprop.predict.records import Counts, Record, plain
from momentprop.predict.temperature import Temperature

__all__ = [
    "ConformalIntervals",
    "ConformalSets",
    "SelectiveCurve",
    "SelectivePoint",
    "Temperature",
    "Threshold",
    "ood_score",
    "selective_curve",
]

Score = Literal["total", "epistemic", "confidence", "variance"]
_OF_CLASSES: tuple[str, ...] = get_args(Score)
_OF_NUMBERS = ("total", "epistemic")


def ood_score(predictive: Any, kind: Score = "total") -> Tensor:
    """Score how unusual each input is; higher is more unusual. [batch, ...], NaN where the prediction is NaN.

    | `kind` | score | asks |
    |---|---|---|
    | `"total"` | entropy of the probabilities | is the answer doubtful at all? |
    | `"epistemic"` | the part of it that is the network's own | do the networks disagree? |
    | `"confidence"` | 1 - largest probability | is the first answer doubtful? |
    | `"variance"` | variance of the probabilities, all classes | do they disagree, as a variance? |

    A regression has `"total"` and `"epistemic"`, which are variances, output by output.

    >>> from types import SimpleNamespace
    >>> predictive = SimpleNamespace(confidence=torch.tensor([0.75, 0.5]), probs=torch.ones(2, 2))
    >>> ood_score(predictive, "confidence").tolist()
    [0.25, 0.5]
    """
    classes = hasattr(predictive, "probs")
    check_choice(kind, "kind", _OF_CLASSES if classes else _OF_NUMBERS)
    if kind == "confidence":
        return 1 - predictive.confidence
    if kind != "variance":
        return getattr(predictive, kind)
    if predictive.probs_variance is None:
        raise ValueError(
            "the predictive has no probs_variance, which kind='variance' needs; choose another kind"
        )
    return predictive.probs_variance.sum(1)


@dataclass(frozen=True)
class Threshold(Record):
    """The largest score that is still accepted. NaN is rejected.

    >>> threshold = Threshold.at(torch.tensor([0.25, 1.0, 0.5, 0.75]), keep=0.75)
    >>> threshold.level, threshold.accepts(torch.tensor([0.75, 0.8])).tolist()
    (0.75, [True, False])
    """

    level: float
    keep: float  # the share asked for
    n: int  # the number of scores it was chosen from

    def __post_init__(self) -> None:
        check_share(self.keep, "keep", one=True)
        if math.isnan(self.level):
            raise ValueError("level is NaN; choose it from scores: Threshold.at(scores, keep)")

    @classmethod
    def at(cls, scores: Tensor, keep: float = 0.95) -> Threshold:
        """The smallest of the given in-distribution scores such that at least `keep` of them are accepted.

        That is the k-th smallest of n, k the smallest integer with k / n >= keep; inputs tied with it are
        accepted too. So the true-positive rate on the given scores is at least `keep`. On new inputs of the
        same kind it is at least k / (n + 1) on average.
        """
        check_values(scores, "scores")
        values = double(scores).flatten().sort().values
        rank = rank_of(check_share(keep, "keep", one=True), len(values))
        return cls(values[rank - 1].item(), float(keep), len(values))

    def accepts(self, scores: Tensor) -> Tensor:
        """True where the score is at most `level`."""
        return (double(scores) <= self.level).to(scores.device)

    def rejects(self, scores: Tensor) -> Tensor:
        """The opposite of `accepts`."""
        return ~self.accepts(scores)


# --- Selective prediction


@dataclass(frozen=True)
class SelectivePoint(Record):
    """Answering the inputs with a score of at most `cutoff`; `accuracy` is NaN if there are none."""

    cutoff: float
    coverage: float
    accuracy: float
    kept: int


@dataclass(frozen=True, eq=False)
class SelectiveCurve(Record):
    """Accuracy of the answers given against their share, one point per distinct score. See `selective_curve`.

    Tensors are one-dimensional, on the CPU: `cutoff` the distinct scores in ascending order, `kept` how many
    inputs have at most that score, `right` how many of those are correct.
    """

    cutoff: Tensor
    kept: Counts
    right: Counts

    def __post_init__(self) -> None:
        if not self.cutoff.dim() == 1 <= len(self.cutoff) == len(self.kept) == len(self.right):
            raise ValueError("cutoff, kept and right must have one length; make a curve with selective_curve")

    @property
    def n(self) -> int:
        """The number of inputs."""
        return int(self.kept[-1])

    @property
    def coverage(self) -> Tensor:
        """The share of inputs that is answered."""
        return self.kept.double() / self.n

    @property
    def accuracy(self) -> Tensor:
        """The share of answers that is correct."""
        return self.right.double() / self.kept

    @property
    def area(self) -> float:
        """AURC, the area under the risk-coverage curve, risk = 1 - accuracy. Lower is better.

        The mean, over the inputs, of the risk among inputs of no higher score (Geifman et al., 2019). Tied
        inputs all count with the risk of the whole group, so their order does not matter.
        """
        group = self.kept.diff(prepend=self.kept.new_zeros(1))
        return ((self.kept - self.right).double() / self.kept * group).sum().item() / self.n

    @property
    def accuracy_area(self) -> float:
        """The area under the accuracy-coverage curve: 1 - `area`. Higher is better."""
        return 1 - self.area

    @property
    def oracle_area(self) -> float:
        """The `area` of the best ordering there is: every mistake after every correct answer."""
        n, right = self.n, int(self.right[-1])
        k = torch.arange(right + 1, n + 1, dtype=torch.float64)
        return ((k - right) / k).sum().item() / n

    @property
    def random_area(self) -> float:
        """The expected `area` of a random ordering: the error rate."""
        return 1 - int(self.right[-1]) / self.n

    @property
    def excess_area(self) -> float:
        """E-AURC: `area` - `oracle_area`, what a better score could still gain. Never negative."""
        return max(0.0, self.area - self.oracle_area)

    def at_coverage(self, coverage: float) -> SelectivePoint:
        """The point of smallest coverage that is at least `coverage`."""
        least = rank_of(check_share(coverage, "coverage", one=True), self.n)
        return self._point(int(torch.searchsorted(self.kept, least)))

    def at_cutoff(self, score: float) -> SelectivePoint:
        """The inputs with a score of at most `score`, the cut-off itself included."""
        if math.isnan(score):
            raise ValueError("the cut-off is NaN; give a number, infinity for all inputs")
        index = int(torch.searchsorted(self.cutoff, float(score), right=True)) - 1
        found = self._point(index) if index >= 0 else SelectivePoint(score, 0.0, math.nan, 0)
        return SelectivePoint(float(score), found.coverage, found.accuracy, found.kept)

    def _point(self, index: int) -> SelectivePoint:
        kept, right = int(self.kept[index]), int(self.right[index])
        return SelectivePoint(self.cutoff[index].item(), kept / self.n, right / kept, kept)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts, and what follows from them for those who only read."""
        names = ("coverage", "accuracy", "area", "excess_area")
        return super().to_dict() | {name: plain(getattr(self, name)) for name in names}


def selective_curve(score: Tensor, correct: Tensor) -> SelectiveCurve:
    """Compute how accuracy rises as inputs are withheld, the highest score first.

    Args:
        score: any shape; the doubt about each input, such as its entropy. Inputs of equal score are
            answered or withheld together.
        correct: same shape; whether the answer is correct: bool, or 0 and 1.

    >>> curve = selective_curve(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1, 1, 0, 1]))
    >>> curve.coverage.tolist(), curve.at_cutoff(0.25).accuracy
    ([0.25, 0.5, 0.75, 1.0], 1.0)
    >>> round(curve.area, 4), round(curve.oracle_area, 4), curve.random_area
    (0.1458, 0.0625, 0.25)
    """
    check_values(score, "score")
    if correct.shape != score.shape:
        raise ValueError(
            f"score is {list(score.shape)} and correct {list(correct.shape)}; give one of each per input"
        )
    values, flags = double(score).cpu().flatten(), double(correct).cpu().flatten()
    if not ((flags == 0) | (flags == 1)).all():
        raise ValueError("correct must be bool, or 0 and 1; for example predictive.label == target")
    values, order = values.sort()
    cutoff, group = torch.unique_consecutive(values, return_counts=True)
    kept = group.cumsum(0)
    return SelectiveCurve(cutoff, kept, flags[order].long().cumsum(0)[kept - 1])
