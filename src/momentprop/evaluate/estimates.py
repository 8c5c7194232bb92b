"""A measured value and the interval it may lie in; what metrics.py is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import NormalDist

import torch
from torch import Tensor

Statistic = Callable[..., Tensor | float]


@dataclass(frozen=True)
class Estimate:
    """A number and the interval that contains its true value with probability `level`.

    >>> estimate = Estimate(0.941, 0.930, 0.952)
    >>> print(estimate)
    0.941 (0.930..0.952)
    >>> estimate.to_dict()
    {'value': 0.941, 'low': 0.93, 'high': 0.952, 'level': 0.95}
    """

    value: float
    low: float
    high: float
    level: float = 0.95

    def __str__(self) -> str:
        width = self.high - self.low
        # two digits of the width, so that a narrow interval does not print as three equal numbers
        decimals = max(3, 1 - math.floor(math.log10(width))) if 0 < width < math.inf else 3
        style = f".{decimals}f" if decimals <= 8 else ".3g"
        return f"{self.value:{style}} ({self.low:{style}}..{self.high:{style}})"

    def to_dict(self) -> dict[str, float]:
        """The four numbers by name, for JSON."""
        return asdict(self)


def wilson(successes: float, n: float, level: float = 0.95) -> Estimate:
    """A rate with the interval of Wilson (1927), which is never empty, also at 0 and at n successes.

    >>> print(wilson(90, 100))
    0.900 (0.826..0.945)
    >>> print(wilson(20, 20))
    1.000 (0.839..1.000)
    """
    if not (n > 0 and 0 <= successes <= n):
        raise ValueError(f"0 <= successes <= n and n > 0 is needed, not {successes} of {n}")
    z, rate = normal_quantile(level), successes / n
    shrink = 1 + z**2 / n
    middle = (rate + z**2 / (2 * n)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
    # at the ends middle -+ half is 0 or 1 but for rounding
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == n else min(1.0, middle + half)
    return Estimate(rate, low, high, level)


def bootstrap(
    statistic: Statistic, *tensors: Tensor, n_resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Estimate:
    """Any statistic with the percentile interval of Efron (1979).

    Args:
        statistic: takes the tensors and returns one number.
        tensors: all with the same number of rows; a resample draws the same rows of each, with replacement.
        n_resamples: how often.
        level: of the interval.
        seed: the interval follows from it; the global random state is left alone.

    >>> print(bootstrap(torch.median, torch.arange(101.0)))
    50.000 (40.000..60.000)
    """
    if not tensors or any(t.ndim == 0 or len(t) == 0 for t in tensors):
        raise ValueError("at least one tensor is needed, and at least one row in each")
    if len({len(t) for t in tensors}) > 1:
        raise ValueError(f"tensors have different numbers of rows: {[len(t) for t in tensors]}")
    samples = resampled(statistic, [tensors], n_resamples, seed)
    return Estimate(float(statistic(*tensors)), *percentiles(samples, level), level)


def pearson(a: Tensor, b: Tensor, *, level: float = 0.95) -> Estimate:
    """Pearson's correlation with Fisher's (1915) interval: atanh r is normal with variance 1 / (n - 3).

    Every element counts as an observation. With n <= 3 the interval is -1..1.

    >>> print(pearson(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.tensor([1.0, 3.0, 2.0, 5.0, 4.0])))
    0.800 (-0.280..0.986)
    """
    a, b = (t.flatten() for t in numbers(a=a, b=b))
    for name, values in (("a", a), ("b", b)):
        if values.min() == values.max():
            raise ValueError(f"all values of {name} are equal: the correlation is not defined")
    r = min(1.0, max(-1.0, torch.corrcoef(torch.stack([a, b]))[0, 1].item()))
    z = normal_quantile(level)
    if len(a) <= 3:
        return Estimate(r, -1.0, 1.0, level)
    if abs(r) == 1:
        return Estimate(r, r, r, level)
    half = z / math.sqrt(len(a) - 3)
    return Estimate(r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half), level)


def normal_quantile(level: float) -> float:
    """1.96 for 0.95: a standard normal is within -+ this with probability `level`."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, not {level}")
    return NormalDist().inv_cdf((1 + level) / 2)


def mean_estimate(losses: Tensor, level: float, least: float = -math.inf, most: float = math.inf) -> Estimate:
    """The mean, -+ 1.96 standard errors over rows, within the bounds that the true mean has."""
    z, value = normal_quantile(level), losses.mean().item()
    if math.isinf(value):
        return Estimate(value, value, value, level)
    rows = losses.flatten(1).mean(1) if losses.ndim > 1 else losses
    half = z * (rows.std() / math.sqrt(len(rows))).item() if len(rows) > 1 else math.inf
    return Estimate(value, max(least, value - half), min(most, value + half), level)


def rate_estimate(hits: Tensor, level: float) -> Estimate:
    """Wilson's interval; with several hits in a row, of as many as would have the variance between rows."""
    n_rows, n = len(hits), float(hits.numel())
    rate = hits.double().mean().item()
    if n > n_rows:
        spread = hits.flatten(1).double().mean(1).var().item() / n_rows if n_rows > 1 else 0.0
        effective = rate * (1 - rate) / spread if spread > 0 else n_rows
        n = min(max(effective, 1.0), n)
    interval = wilson(rate * n, n, level)
    return Estimate(rate, interval.low, interval.high, level)


def resampled(statistic: Statistic, groups: list[tuple[Tensor, ...]], n_resamples: int, seed: int) -> Tensor:
    """The statistic of each resample; the rows of a group's tensors are drawn together."""
    if n_resamples < 1:
        raise ValueError(f"n_resamples must be at least 1, not {n_resamples}")
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(n_resamples):
        drawn: list[Tensor] = []
        for group in groups:
            n = len(group[0])
            rows = torch.randint(n, (n,), generator=generator)
            drawn += [t[rows.to(t.device)] for t in group]
        values.append(float(statistic(*drawn)))
    samples = torch.tensor(values, dtype=torch.float64)
    if samples.isnan().any():
        raise ValueError(f"the statistic is NaN in {int(samples.isnan().sum())} of {n_resamples} resamples")
    return samples


def percentiles(samples: Tensor, level: float) -> tuple[float, float]:
    normal_quantile(level)  # refuses a level outside 0..1
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = samples.quantile(ends).tolist()
    return low, high


def numbers(*, finite: bool = True, **named: Tensor) -> list[Tensor]:
    """The tensors in float64, all of one shape, none empty, no NaN."""
    shapes = {name: tuple(t.shape) for name, t in named.items()}
    if len(set(shapes.values())) > 1:
        listing = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"shapes differ: {listing}")
    for name, tensor in named.items():
        check_numbers(name, tensor, finite)
    return [t.detach().to("cpu", torch.float64) for t in named.values()]


def check_numbers(name: str, tensor: Tensor, finite: bool) -> None:
    if tensor.numel() == 0:
        raise ValueError(f"{name} is empty")
    if tensor.ndim == 0:
        raise ValueError(f"{name} has no dimension: at least [batch] is needed")
    if tensor.isnan().any():
        raise ValueError(f"{name} contains NaN, in {int(tensor.isnan().sum())} of {tensor.numel()} places")
    if finite and tensor.isinf().any():
        raise ValueError(f"{name} contains infinity")


def check_ordered(low: Tensor, high: Tensor) -> None:
    if (low > high).any():
        raise ValueError(f"low is above high in {int((low > high).sum())} of {low.numel()} places")
