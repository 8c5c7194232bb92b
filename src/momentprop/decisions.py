"""What one does with a predictive distribution: flag, abstain, cover, calibrate.

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
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

_UNIT = 2**52  # masses are added as integers, in 1 / _UNIT: the same sum in any order, on any device
_KINDS = ("entropy", "confidence", "mutual_information", "variance")
_METHODS = ("lac", "aps")
_COLDEST, _HOTTEST = 0.01, 100.0  # the temperatures considered

Counts = Tensor  # of integers


class Spread(Protocol):
    """A prediction with a mean and a standard deviation: a regression predictive, or `Moments`."""

    @property
    def mean(self) -> Tensor: ...

    @property
    def std(self) -> Tensor: ...


class _Record:
    """A dataclass of numbers and tensors that goes to plain JSON and back."""

    def to_dict(self) -> dict[str, Any]:
        """Its fields as JSON numbers, lists and strings."""
        return {name: _plain(getattr(self, name)) for name in _names(type(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        missing = [name for name in _names(cls) if name not in data]
        if missing:
            raise ValueError(f"the dictionary lacks {', '.join(missing)}; give one that to_dict made")
        return cls(**{f.name: _READ.get(f.type, _as_is)(data[f.name]) for f in fields(cls)})  # type: ignore[arg-type]


# --- Out of distribution


def ood_score(predictive: Any, kind: str = "entropy") -> Tensor:
    """How unusual each input is; higher is more unusual. [batch, ...], NaN where the prediction is NaN.

    | `kind` | score | asks |
    |---|---|---|
    | `"entropy"` | entropy of the probabilities | is the answer doubtful at all? |
    | `"confidence"` | 1 - largest probability | the same, of the first answer alone |
    | `"mutual_information"` | entropy - expected entropy | do the networks disagree? |
    | `"variance"` | variance of the probabilities, over all classes | the same, as a variance |

    A regression has `"variance"` only: its epistemic variance, output by output.

    >>> from types import SimpleNamespace
    >>> predictive = SimpleNamespace(confidence=torch.tensor([0.75, 0.5]), probs=torch.ones(2, 2))
    >>> ood_score(predictive, "confidence").tolist()
    [0.25, 0.5]
    """
    classes = hasattr(predictive, "probs")
    _check_choice(kind, "kind", _KINDS if classes else _KINDS[-1:])
    if kind == "confidence":
        return 1 - predictive.confidence
    name = {"variance": "probs_variance" if classes else "epistemic"}.get(kind, kind)
    value = getattr(predictive, name, None)
    if value is None:
        raise ValueError(f"the predictive has no {name}, which kind={kind!r} needs; choose another kind")
    return value.sum(1) if name == "probs_variance" else value


@dataclass(frozen=True)
class Threshold(_Record):
    """The largest score that is still accepted. NaN is rejected.

    >>> threshold = Threshold.at(torch.tensor([0.25, 1.0, 0.5, 0.75]), keep=0.75)
    >>> threshold.level, threshold.accepts(torch.tensor([0.75, 0.8])).tolist()
    (0.75, [True, False])
    """

    level: float
    keep: float  # the share asked for
    n: int  # the number of scores it was chosen from

    def __post_init__(self) -> None:
        _check_share(self.keep, "keep", one=True)
        if math.isnan(self.level):
            raise ValueError("level is NaN; choose it from scores: Threshold.at(scores, keep)")

    @classmethod
    def at(cls, scores: Tensor, keep: float = 0.95) -> Threshold:
        """The smallest of the given in-distribution scores such that at least `keep` of them are accepted.

        That is the k-th smallest of n, k the smallest integer with k / n >= keep; inputs tied with it are
        accepted too. So the true-positive rate on the given scores is at least `keep`. On new inputs of the
        same kind it is at least k / (n + 1) on average.
        """
        _check_values(scores, "scores")
        values = _double(scores).flatten().sort().values
        rank = _rank(_check_share(keep, "keep", one=True), len(values))
        return cls(values[rank - 1].item(), float(keep), len(values))

    def accepts(self, scores: Tensor) -> Tensor:
        """True where the score is at most `level`."""
        return (_double(scores) <= self.level).to(scores.device)

    def rejects(self, scores: Tensor) -> Tensor:
        """The opposite of `accepts`."""
        return ~self.accepts(scores)


# --- Selective prediction


@dataclass(frozen=True)
class SelectivePoint(_Record):
    """Answering the inputs with a score of at most `cutoff`; `accuracy` is NaN if there are none."""

    cutoff: float
    coverage: float
    accuracy: float
    kept: int


@dataclass(frozen=True, eq=False)
class SelectiveCurve(_Record):
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
        least = _rank(_check_share(coverage, "coverage", one=True), self.n)
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
        """The counts, and what follows from them for those who only read."""
        names = ("coverage", "accuracy", "area", "excess_area")
        return super().to_dict() | {name: _plain(getattr(self, name)) for name in names}


def selective_curve(score: Tensor, correct: Tensor) -> SelectiveCurve:
    """How accuracy rises as inputs are withheld, the highest score first.

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
    _check_values(score, "score")
    if correct.shape != score.shape:
        raise ValueError(
            f"score is {list(score.shape)} and correct {list(correct.shape)}; give one of each per input"
        )
    values, flags = _double(score).cpu().flatten(), _double(correct).cpu().flatten()
    if not ((flags == 0) | (flags == 1)).all():
        raise ValueError("correct must be bool, or 0 and 1; for example predictive.label == target")
    values, order = values.sort()
    cutoff, group = torch.unique_consecutive(values, return_counts=True)
    kept = group.cumsum(0)
    return SelectiveCurve(cutoff, kept, flags[order].long().cumsum(0)[kept - 1])


# --- Conformal prediction


@dataclass(frozen=True, eq=False)
class ConformalIntervals(_Record):
    """Intervals mean -+ `scale` std that hold the true value with probability at least `level`.

    Split conformal prediction (Papadopoulos et al., 2002; Lei et al., 2018). The promise needs one thing
    only: calibration data and new data are exchangeable, and the network has seen neither. It is on average
    over both; it is neither a promise for each input nor one for all outputs of an input at once.

    >>> from types import SimpleNamespace
    >>> predictive = SimpleNamespace(mean=torch.zeros(9), std=torch.ones(9))
    >>> conformal = ConformalIntervals.fit(predictive, torch.arange(9.0), level=0.8)
    >>> conformal.scale.item()
    7.0
    >>> low, high = conformal.interval(SimpleNamespace(mean=torch.tensor([5.0]), std=torch.tensor([2.0])))
    >>> round(low.item(), 3), round(high.item(), 3)
    (-9.0, 19.0)
    """

    level: float
    n: int
    scale: Tensor  # one per output, float64 on the CPU

    def __post_init__(self) -> None:
        _check_share(self.level, "level")

    @classmethod
    def fit(cls, predictive: Spread, y: Tensor, level: float = 0.9) -> ConformalIntervals:
        """Choose `scale` on held-out data: the ceil((n + 1) level)-th smallest of |y - mean| / std.

        Args:
            predictive: `.mean` and `.std`, [n, ...]; with more dimensions every output has its own scale.
            y: the true values, in the shape of the mean.
            level: the coverage asked for, in (0, 1).

        A std of 0 claims to be certain: the score is 0 if that is true and infinite if not, and the interval
        is [mean, mean] up to rounding. If such false claims are more than 1 - level of the data, or if there
        are fewer than level / (1 - level) data points, no finite interval keeps the promise: `scale` is then
        infinite, the interval the whole line, and a warning says so.
        """
        mean, std, truth = (_double(t) for t in (predictive.mean, predictive.std, y))
        if y.dim() == 0 or not mean.shape == std.shape == truth.shape:
            shapes = ", ".join(str(list(t.shape)) for t in (mean, std, truth))
            raise ValueError(f"mean, std and y are {shapes}; all must be [n, ...], of the same shape")
        for name, value in (("mean", mean), ("std", std), ("y", truth)):
            _check_values(value, name, finite=True)
        if (std < 0).any():
            raise ValueError("std has negative values; give standard deviations, 0 or larger")
        error = (truth - mean).abs()
        score = torch.where(error == 0, 0.0, error / std)  # 0 / 0: certain, and right
        return cls(float(level), len(score), _conformal_quantile(score, level))

    def interval(self, predictive: Spread) -> tuple[Tensor, Tensor]:
        """(low, high) in the shape, dtype and device of the mean, rounded outwards; NaN where that is NaN."""
        mean, std = _double(predictive.mean), _double(predictive.std)
        if mean.dim() == 0 or mean.shape != std.shape or mean.shape[1:] != self.scale.shape:
            raise ValueError(
                f"mean and std are {list(mean.shape)} and {list(std.shape)}, but the intervals were fitted "
                f"for {['n', *self.scale.shape]}; give outputs of that shape"
            )
        scale = self.scale.to(mean.device)
        half = torch.where(scale.isinf(), math.inf, scale * std)
        # y is inside exactly if its score is at most `scale`; rounding must not put it outside
        half = half * (1 + 8 * torch.finfo(half.dtype).eps)
        like = predictive.mean
        return _rounded(mean - half, like, -1), _rounded(mean + half, like, 1)


@dataclass(frozen=True, eq=False)
class ConformalSets(_Record):
    """Sets of labels that hold the true one with probability at least `level`. The promise as for intervals.

    | `method` | a label is in the set if |
    |---|---|
    | `"lac"` | 1 - its probability is at most `cutoff` |
    | `"aps"` | the mass of all labels at least as probable is at most `cutoff` |

    `"lac"` (Sadinle et al., 2019) has the smallest sets on average; a set is empty where no label is probable
    enough. `"aps"` (Romano et al., 2020) adapts to the input; its sets always have the most probable label,
    unless it is randomised, which makes sets smaller: see `fit`. Rows with NaN get every label.

    >>> probs = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [0.75, 0.25]])
    >>> conformal = ConformalSets.fit(probs, torch.tensor([0, 1, 1, 1]), level=0.6)
    >>> conformal.cutoff.item(), conformal.sets(probs[:2]).tolist()
    (0.5, [[True, False], [True, True]])
    """

    method: str
    level: float
    n: int
    classes: int
    cutoff: Tensor  # one per position [...], float64 on the CPU
    randomised: bool = False

    def __post_init__(self) -> None:
        _check_share(self.level, "level")
        _check_choice(self.method, "method", _METHODS)

    @classmethod
    def fit(
        cls,
        probs: Tensor,
        target: Tensor,
        level: float = 0.9,
        method: str = "lac",
        uniform: Tensor | None = None,
    ) -> ConformalSets:
        """Choose `cutoff` on held-out data: the ceil((n + 1) level)-th smallest score of the true labels.

        Args:
            probs: probabilities [n, K, ...]. With more dimensions every position has its own cut-off, since
                positions of one input are not exchangeable; if yours are, move them into the batch.
            target: integer labels [n, ...].
            level: the coverage asked for, in (0, 1).
            method: `"lac"` or `"aps"`.
            uniform: for `"aps"`, independent uniform numbers [n, ...], which randomise the score: a label
                then counts with that share of its own mass. `sets` needs new ones for every input.

        With fewer than level / (1 - level) data points the cut-off is infinite: every label is in every set,
        and a warning says so.
        """
        _check_choice(method, "method", _METHODS)
        if method == "lac" and uniform is not None:
            raise ValueError("method='lac' is not randomised; leave out uniform, or choose method='aps'")
        _check_probs(probs)
        _check_target(target, probs)
        if probs.isnan().any():
            raise ValueError("probs has NaN; fit on inputs whose prediction is finite")
        score = _label_scores(probs, method, uniform)
        score = score.gather(1, target.long().to(score.device).unsqueeze(1)).squeeze(1)
        cutoff = _conformal_quantile(score, level)
        return cls(method, float(level), len(score), probs.shape[1], cutoff, uniform is not None)

    def sets(self, probs: Tensor, uniform: Tensor | None = None) -> Tensor:
        """True for the labels in the set: [batch, K, ...], like `probs`."""
        _check_probs(probs, empty=True)
        if probs.shape[1] != self.classes or probs.shape[2:] != self.cutoff.shape:
            raise ValueError(
                f"probs is {list(probs.shape)}, but the sets were fitted for "
                f"{['n', self.classes, *self.cutoff.shape]}; give probabilities of that shape"
            )
        if self.randomised != (uniform is not None):
            need = "needs" if self.randomised else "takes no"
            raise ValueError(
                f"sets {need} uniform, as fit was called; the promise holds only for the same score"
            )
        score = _label_scores(probs, self.method, uniform)
        chosen = (score <= self.cutoff.to(score.device)).to(probs.device)
        if self.method == "aps" and not self.randomised:
            chosen |= probs == probs.amax(1, keepdim=True)
        return chosen | probs.isnan().any(1, keepdim=True)

    def size(self, probs: Tensor, uniform: Tensor | None = None) -> Tensor:
        """The number of labels in each set: [batch, ...]."""
        return self.sets(probs, uniform).sum(1)


def _conformal_quantile(score: Tensor, level: float) -> Tensor:
    """The ceil((n + 1) level)-th smallest score along the batch; infinite if there are not so many."""
    n = len(score)
    rank = _rank(_check_share(level, "level"), n + 1)
    if rank > n:
        least = max(n + 1, int(level / (1 - level)) - 1)
        while _rank(level, least + 1) > least:
            least += 1
        warnings.warn(
            f"{n} calibration point(s) are too few for level {level}: every interval is infinite, every set "
            f"has all labels; give at least {least}",
            stacklevel=3,
        )
        return torch.full(score.shape[1:], math.inf, dtype=torch.float64)
    quantile = score.sort(dim=0).values[rank - 1].cpu()
    if quantile.isinf().any():
        warnings.warn(
            f"more than 1 - {level} of the calibration points have std 0 and a wrong mean: intervals are "
            "infinite; give the prediction a noise variance",
            stacklevel=3,
        )
    return quantile


def _label_scores(probs: Tensor, method: str, uniform: Tensor | None) -> Tensor:
    """How little each label conforms, in the shape of `probs`; a NaN row gets any numbers."""
    values = _double(probs)
    if method == "lac":
        return 1 - values
    # integers: sums do not depend on their order, and equal probabilities get equal scores
    units = (values.nan_to_num().movedim(1, -1) * _UNIT).round().long()
    units, order = units.sort(dim=-1, descending=True)
    edge = torch.ones_like(units[..., :1], dtype=torch.bool)
    change = units[..., 1:] != units[..., :-1]
    mass = units.cumsum(-1)
    before, mass = (mass - units).clamp(max=_UNIT), mass.clamp(max=_UNIT)
    mass[..., -1] = _UNIT  # the last label completes the mass, whatever rounding says
    mass = mass.masked_fill(~torch.cat([change, edge], -1), _UNIT).flip(-1).cummin(-1).values.flip(-1)
    # one unit more per place: where the first label has all the mass, the impossible ones come after it
    rank = F.pad(change.long().cumsum(-1), (1, 0))
    score = mass.double() / _UNIT
    if uniform is not None:
        before = before.masked_fill(~torch.cat([edge, change], -1), 0).cummax(-1).values
        low = before.double() / _UNIT
        score = low + _check_uniform(uniform, probs).to(low.device).unsqueeze(-1) * (score - low)
    score = score + rank.double() / _UNIT
    return torch.empty_like(score).scatter_(-1, order, score).movedim(-1, 1)


# --- Temperature


@dataclass(frozen=True)
class Temperature(_Record):
    """Probabilities softmax(log_probs / value): below 1 surer, above 1 more modest (Guo et al., 2017).

    >>> log_probs = torch.tensor([[0.9, 0.1]]).log().expand(4, 2)  # says 9 in 10, is right in 3 of 4
    >>> temperature = Temperature.fit(log_probs, torch.tensor([0, 0, 0, 1]))
    >>> round(temperature.value, 4), temperature.apply(log_probs)[0].exp().round(decimals=4).tolist()
    (2.0, [0.75, 0.25])
    """

    value: float

    def __post_init__(self) -> None:
        if not 0 < self.value < math.inf:
            raise ValueError(f"a temperature is positive and finite, not {self.value}")

    @classmethod
    def fit(cls, log_probs: Tensor, target: Tensor) -> Temperature:
        """The temperature of least negative log likelihood on held-out data.

        The likelihood is convex in 1 / T, so Newton's method inside a bracket finds the one minimum. It is
        sought between 0.01 and 100 and may be the bound itself: 0.01 if every target is the most probable
        label, 100 if the probabilities say less than nothing. If T makes no difference it is 1.

        Args:
            log_probs: [n, K, ...], log probabilities or logits; -inf for an impossible label.
            target: integer labels [n, ...].
        """
        _check_log_probs(log_probs)
        values = _double(log_probs)
        _check_values(values, "log_probs")
        _check_target(target, log_probs)
        if (values == math.inf).any() or (values.amax(1) == -math.inf).any():
            raise ValueError(
                "log_probs has +inf, or rows of -inf alone; give finite values for possible labels"
            )
        values = values - values.amax(1, keepdim=True)
        chosen = values.gather(1, target.long().to(values.device).unsqueeze(1)).squeeze(1)
        impossible = int((chosen == -math.inf).sum())
        if impossible:
            raise ValueError(
                f"{impossible} target(s) have probability 0, which no temperature mends; clamp log_probs"
            )
        return cls(1 / _least_slope(values, chosen))

    def apply(self, log_probs: Tensor) -> Tensor:
        """The log probabilities at this temperature: [batch, K, ...], differentiable."""
        _check_log_probs(log_probs)
        return torch.log_softmax(log_probs / self.value, dim=1)


def _least_slope(values: Tensor, chosen: Tensor) -> float:
    """The inverse temperature at which the likelihood's slope is zero, or the bound nearest to it."""
    finite = values.clamp_min(torch.finfo(values.dtype).min)  # 0 * -inf would be NaN

    def derivatives(beta: float) -> tuple[float, float]:
        p = torch.softmax(values * beta, dim=1)
        mean = (p * finite).sum(1, keepdim=True)
        spread = (p * torch.where(p > 0, finite - mean, 0.0).square()).sum(1)
        return (mean.squeeze(1) - chosen).mean().item(), spread.mean().item()

    low, high, beta, last = 1 / _HOTTEST, 1 / _COLDEST, 1.0, math.inf
    if derivatives(beta)[0] == 0:
        return beta
    if derivatives(low)[0] >= 0:
        return low
    if derivatives(high)[0] <= 0:
        return high
    for _ in range(200):
        slope, curvature = derivatives(beta)
        if slope == 0:
            break
        low, high = (low, beta) if slope > 0 else (beta, high)
        step = beta - slope / curvature if curvature > 0 else math.inf
        if not low < step < high or abs(slope) > last / 10:  # outside, or Newton is slow here
            step = math.sqrt(low * high)
        if abs(step - beta) <= 1e-13 * beta:
            break
        beta, last = step, abs(slope)
    return beta


# --- Checks and plain numbers


def _double(value: Tensor) -> Tensor:
    """In float64, which mps has not: there on the CPU."""
    value = value.detach()
    return (value.cpu() if value.device.type == "mps" else value).double()


def _rounded(value: Tensor, like: Tensor, sign: int) -> Tensor:
    """A float64 in the dtype and on the device of `like`, rounded down (sign -1) or up (1)."""
    result = value.to(like.dtype)
    limits = torch.finfo(
        like.dtype
    )  # one step at least, and little more; nextafter does not exist everywhere
    return (result + sign * (result.abs() * limits.eps + limits.smallest_normal * limits.eps)).to(like.device)


def _check_choice(value: str, name: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not possible here; choose {' or '.join(map(repr, choices))}")


def _check_share(value: float, name: str, one: bool = False) -> float:
    if not (0 < value < 1 or (one and value == 1)):
        raise ValueError(f"{name}={value} must lie in (0, 1{']' if one else ')'}; for example {name}=0.9")
    return float(value)


def _rank(share: float, n: int) -> int:
    """The smallest k with k / n >= share: ceil(share n), but 7 for 0.07 of 100 and 5 for 5/6 of 6."""
    k = max(1, math.ceil(share * n) - 1)
    while k / n < share:
        k += 1
    return k


def _check_values(value: Tensor, name: str, finite: bool = False) -> None:
    if value.numel() == 0:
        raise ValueError(f"{name} is empty; give at least one value")
    bad = int((~value.isfinite() if finite else value.isnan()).sum())
    if bad:
        what = "NaN or infinite" if finite else "NaN"
        raise ValueError(f"{bad} of {value.numel()} values in {name} are {what}; leave those inputs out")


def _check_probs(probs: Tensor, empty: bool = False) -> None:
    if probs.dim() < 2 or not probs.is_floating_point() or (probs.numel() == 0 and not empty):
        raise ValueError(f"probs is {_describe(probs)}; give probabilities [n, K, ...], n and K at least 1")
    values = _double(probs)
    slack = 1e-3 + 4 * torch.finfo(probs.dtype).eps
    if (values < 0).any() or ((values.sum(1) - 1).abs() > slack).any():
        raise ValueError(
            "probs must be 0 or larger, and sum to 1 over dimension 1; of logits, take softmax(1)"
        )


def _check_log_probs(log_probs: Tensor) -> None:
    if log_probs.dim() < 2 or not log_probs.is_floating_point():
        raise ValueError(f"log_probs is {_describe(log_probs)}; give log probabilities [n, K, ...]")


def _check_target(target: Tensor, probs: Tensor) -> None:
    shape = [probs.shape[0], *probs.shape[2:]]
    kind = target.dtype
    if list(target.shape) != shape or kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise ValueError(f"target is {_describe(target)}; give integer labels {shape}")
    if target.numel() == 0:
        raise ValueError("target is empty; give at least one label")
    least, most = int(target.min()), int(target.max())
    if least < 0 or most >= probs.shape[1]:
        raise ValueError(
            f"target has labels {least} to {most}, classes are 0 to {probs.shape[1] - 1}; leave others out"
        )


def _check_uniform(uniform: Tensor, probs: Tensor) -> Tensor:
    shape = [probs.shape[0], *probs.shape[2:]]
    values = _double(uniform)
    if list(uniform.shape) != shape or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"uniform is {_describe(uniform)}; give numbers in [0, 1] of shape {shape}")
    return values


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _plain(value: Any) -> Any:
    """As strict JSON knows it: tensors as lists, infinity as "inf", NaN as null."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _tensor(value: Any) -> Tensor:
    def numbers(v: Any) -> Any:
        return [numbers(u) for u in v] if isinstance(v, list) else _number(v)

    return torch.tensor(numbers(value), dtype=torch.float64)


def _counts(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


def _as_is(value: Any) -> Any:
    return value


_READ = {"float": _number, "Tensor": _tensor, "Counts": _counts}  # by a field's annotation


def _names(record: type) -> list[str]:
    return [f.name for f in fields(record)]
