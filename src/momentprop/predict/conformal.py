"""Split conformal calibration: intervals and label sets that hold the truth as often as promised.

However bad the predictive distribution is: the promise needs only calibration data that are exchangeable with
new data, and that the network has not seen.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from momentprop.predict.checks import (
    check_choice,
    check_probs,
    check_share,
    check_target,
    check_uniform,
    check_values,
    double,
    rank_of,
    rounded,
)
from momentprop.predict.class_predictive import Probabilities, probs_of
from momentprop.predict.records import Record

_UNIT = 2**52  # masses are added as integers, in 1 / _UNIT: the same sum in any order, on any device
_METHODS = ("lac", "aps")


class Spread(Protocol):
    """A prediction with a mean and a standard deviation: a regression predictive, or `Moments`."""

    @property
    def mean(self) -> Tensor: ...

    @property
    def std(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class ConformalIntervals(Record):
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
        check_share(self.level, "level")

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
        mean, std, truth = (double(t) for t in (predictive.mean, predictive.std, y))
        if y.dim() == 0 or not mean.shape == std.shape == truth.shape:
            shapes = ", ".join(str(list(t.shape)) for t in (mean, std, truth))
            raise ValueError(f"mean, std and y are {shapes}; all must be [n, ...], of the same shape")
        for name, value in (("mean", mean), ("std", std), ("y", truth)):
            check_values(value, name, finite=True)
        if (std < 0).any():
            raise ValueError("std has negative values; give standard deviations, 0 or larger")
        error = (truth - mean).abs()
        score = torch.where(error == 0, 0.0, error / std)  # 0 / 0: certain, and right
        return cls(float(level), len(score), _conformal_quantile(score, level))

    def interval(self, predictive: Spread) -> tuple[Tensor, Tensor]:
        """(low, high) in the shape, dtype and device of the mean, rounded outwards; NaN where that is NaN."""
        mean, std = double(predictive.mean), double(predictive.std)
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
        return rounded(mean - half, like, -1), rounded(mean + half, like, 1)


@dataclass(frozen=True, eq=False)
class ConformalSets(Record):
    """Sets of labels that hold the true one with probability at least `level`, as for `ConformalIntervals`.

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
        check_share(self.level, "level")
        check_choice(self.method, "method", _METHODS)

    @classmethod
    def fit(
        cls,
        probs: Probabilities,
        target: Tensor,
        level: float = 0.9,
        method: str = "lac",
        uniform: Tensor | None = None,
    ) -> ConformalSets:
        """Choose `cutoff` on held-out data: the ceil((n + 1) level)-th smallest score of the true labels.

        Args:
            probs: what `classify` gives, or probabilities [n, K, ...]. With more dimensions every position
                has its own cut-off, since positions of one input are not exchangeable; if yours are, move
                them into the batch.
            target: integer labels [n, ...].
            level: the coverage asked for, in (0, 1).
            method: `"lac"` or `"aps"`.
            uniform: for `"aps"`, independent uniform numbers [n, ...], which randomise the score: a label
                then counts with that share of its own mass. `sets` needs new ones for every input.

        With fewer than level / (1 - level) data points the cut-off is infinite: every label is in every set,
        and a warning says so.
        """
        check_choice(method, "method", _METHODS)
        if method == "lac" and uniform is not None:
            raise ValueError("method='lac' is not randomised; leave out uniform, or choose method='aps'")
        probs = probs_of(probs)
        check_probs(probs)
        check_target(target, probs)
        if probs.isnan().any():
            raise ValueError("probs has NaN; fit on inputs whose prediction is finite")
        score = _label_scores(probs, method, uniform)
        score = score.gather(1, target.long().to(score.device).unsqueeze(1)).squeeze(1)
        cutoff = _conformal_quantile(score, level)
        return cls(method, float(level), len(score), probs.shape[1], cutoff, uniform is not None)

    def sets(self, probs: Probabilities, uniform: Tensor | None = None) -> Tensor:
        """True for the labels in the set: [batch, K, ...], like `probs`."""
        probs = probs_of(probs)
        check_probs(probs, empty=True)
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

    def size(self, probs: Probabilities, uniform: Tensor | None = None) -> Tensor:
        """The number of labels in each set: [batch, ...]."""
        return self.sets(probs, uniform).sum(1)


def _conformal_quantile(score: Tensor, level: float) -> Tensor:
    """The ceil((n + 1) level)-th smallest score along the batch; infinite if there are not so many."""
    n = len(score)
    rank = rank_of(check_share(level, "level"), n + 1)
    if rank > n:
        least = max(n + 1, int(level / (1 - level)) - 1)
        while rank_of(level, least + 1) > least:
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
    """Score how little each label conforms, in the shape of `probs`; a NaN row gets any numbers."""
    values = double(probs)
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
        score = low + check_uniform(uniform, probs).to(low.device).unsqueeze(-1) * (score - low)
    score = score + rank.double() / _UNIT
    return torch.empty_like(score).scatter_(-1, order, score).movedim(-1, 1)
