"""Temperature scaling: probabilities made neither too sure nor too modest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from momentprop.predict.checks import check_log_probs, check_target, check_values, double
from momentprop.predict.class_predictive import Probabilities, log_probs_of
from momentprop.predict.records import Record

_COLDEST, _HOTTEST = 0.01, 100.0  # the temperatures considered


@dataclass(frozen=True)
class Temperature(Record):
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
    def fit(cls, log_probs: Probabilities, target: Tensor) -> Temperature:
        """The temperature of least negative log likelihood on held-out data.

        The likelihood is convex in 1 / T, so bisection finds the one minimum. It is
        sought between 0.01 and 100 and may be the bound itself: 0.01 if every target is the most probable
        label, 100 if the probabilities say less than nothing. If T makes no difference it is 1.

        Args:
            log_probs: what `classify` gives; or log probabilities or logits [n, K, ...], -inf for an
                impossible label.
            target: integer labels [n, ...].
        """
        log_probs = log_probs_of(log_probs)
        check_log_probs(log_probs)
        values = double(log_probs)
        check_values(values, "log_probs")
        check_target(target, log_probs)
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

    def apply(self, log_probs: Probabilities) -> Tensor:
        """The log probabilities at this temperature: [batch, K, ...], differentiable."""
        log_probs = log_probs_of(log_probs)
        check_log_probs(log_probs)
        return torch.log_softmax(log_probs / self.value, dim=1)


def _least_slope(values: Tensor, chosen: Tensor) -> float:
    """The inverse temperature at which the likelihood's slope is zero, or the bound nearest to it."""
    finite = values.clamp_min(torch.finfo(values.dtype).min)  # 0 * -inf would be NaN

    def slope(beta: float) -> float:
        mean = (torch.softmax(values * beta, dim=1) * finite).sum(1)
        return (mean - chosen).mean().item()

    low, high = 1 / _HOTTEST, 1 / _COLDEST
    if slope(1.0) == 0:
        return 1.0
    if slope(low) >= 0:
        return low
    if slope(high) <= 0:
        return high
    while high > low * (1 + 1e-13):
        beta = math.sqrt(low * high)
        low, high = (low, beta) if slope(beta) > 0 else (beta, high)
    return math.sqrt(low * high)
