"""The predictive distribution of a real target: normal, or a mixture of normals for samples and ensembles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from momentprop.predict.batched import Batched


@dataclass(eq=False)
class RegressionPredictive(Batched):
    """A normal distribution of the target, or a mixture of T normals: components [T, *shape].

    Without weights all components count the same. Uncertainties are variances: `epistemic` is that of the
    network's prediction, `aleatoric` that of the noise in the data, and `total` their sum.

    >>> import momentprop as mp
    >>> y = mp.regress(mp.Moments(torch.zeros(1), 3.0), noise=1.0)
    >>> y.std.tolist(), [round(v.item(), 2) for v in y.interval(0.95)]
    ([2.0], [-3.92, 3.92])
    >>> y.total.item(), y.aleatoric.item(), y.epistemic.item()
    (4.0, 1.0, 3.0)
    """

    batch_dim: ClassVar[int] = 1  # behind that of the components

    means: Tensor
    epistemics: Tensor  # variance of the mean that each component has by itself
    aleatorics: Tensor  # variance of the noise around it
    weights: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        return self._average(self.means)

    @property
    def epistemic(self) -> Tensor:
        """Variance of the network's prediction."""
        return self._average(self.epistemics + (self.means - self.mean).square())

    @property
    def aleatoric(self) -> Tensor:
        """Variance of the noise in the data."""
        return self._average(self.aleatorics)

    @property
    def total(self) -> Tensor:
        """Variance of the target."""
        return self.epistemic + self.aleatoric

    @property
    def variance(self) -> Tensor:
        return self.total

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    @property
    def batch_shape(self) -> torch.Size:
        return self.means.shape[1:]

    @property
    def abstain(self) -> Tensor:
        """Say which targets have no prediction: mean or variance is not finite."""
        return ~(self.mean.isfinite() & self.total.isfinite())

    def log_prob(self, y: Tensor) -> Tensor:
        """Density at y, in logarithms, element by element."""
        y = self._fitting(y)
        variance = self._component_variance
        exponents = -0.5 * ((y - self.means) ** 2 / variance + variance.log() + math.log(2 * math.pi))
        if self.weights is not None:
            tiny = torch.finfo(self.weights.dtype).tiny
            logs = torch.where(self.weights > tiny, self.weights, tiny).log()
            return (exponents + logs.where(self.weights > tiny, -math.inf)).logsumexp(0)
        return exponents[0] if len(self.means) == 1 else exponents.logsumexp(0) - math.log(len(self.means))

    def nll(self, y: Tensor) -> Tensor:
        return -self.log_prob(y)

    def cdf(self, y: Tensor) -> Tensor:
        y = self._fitting(y)
        return self._average(torch.special.ndtr((y - self.means) / self._component_variance.sqrt()))

    def quantile(self, q: float) -> Tensor:
        """The value below which the target lies with probability q."""
        if not 0 < q < 1:
            raise ValueError(f"q must lie between 0 and 1, not {q}")
        z = NormalDist().inv_cdf(q)
        std = self._component_variance.sqrt()
        each = self.means + z * std
        low, high = each.amin(0), each.amax(0)
        if len(self.means) == 1:
            return each[0]
        for _ in range(60 if low.dtype == torch.float64 else 30):  # it lies between the components' own
            middle = (low + high) / 2
            below = self.cdf(middle) < q
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that holds the target with this probability."""
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, not {level}")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Targets [*shape, *batch_shape]."""
        count = max(math.prod(shape), 1)
        full = (count, *self.batch_shape)
        options: Any = {"generator": generator, "device": self.means.device}
        if self.weights is None:
            chosen = torch.randint(len(self.means), full, **options)
        else:
            rows = self.weights.flatten(1).T.clamp_min(0)
            chosen = torch.multinomial(rows, count, replacement=True, generator=generator).T.reshape(full)
        noise = torch.randn(full, dtype=self.means.dtype, **options)
        drawn = self.means.gather(0, chosen) + self._component_variance.sqrt().gather(0, chosen) * noise
        return drawn[: math.prod(shape)].reshape(*shape, *self.batch_shape)

    def to_dict(self, level: float = 0.95) -> dict[str, Any]:
        """Plain lists and numbers, for serving."""
        low, high = self.interval(level)
        names = ("mean", "std", "total", "aleatoric", "epistemic", "abstain")
        out: dict[str, Any] = {name: getattr(self, name).tolist() for name in names}
        return out | {"interval": {"level": level, "low": low.tolist(), "high": high.tolist()}}

    def distribution(self) -> torch.distributions.Distribution:
        """Return the distribution of the targets as PyTorch has it: a normal, or a mixture of normals."""
        std = self._component_variance.sqrt()
        if len(self.means) == 1:
            return torch.distributions.Normal(self.means[0], std[0])
        shares, means, stds = (v.movedim(0, -1) for v in (self.shares, self.means, std))
        chosen = torch.distributions.Categorical(probs=shares)
        return torch.distributions.MixtureSameFamily(chosen, torch.distributions.Normal(means, stds))

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Put batches one behind the other, as `torch.cat` does."""
        if len({len(part.means) for part in parts}) > 1:
            raise ValueError("predictions of different numbers of components cannot be put together")
        if len({part.weights is None for part in parts}) > 1:
            parts = [dataclasses.replace(part, weights=part.shares) for part in parts]
        return super().cat(parts)

    @property
    def shares(self) -> Tensor:
        """Return the weight of each component, [T, *batch_shape], also where all count the same."""
        return torch.full_like(self.means, 1 / len(self.means)) if self.weights is None else self.weights

    def _average(self, values: Tensor) -> Tensor:
        """Average over the components."""
        return values.mean(0) if self.weights is None else (self.weights * values).sum(0)

    @property
    def _component_variance(self) -> Tensor:
        variance = self.epistemics + self.aleatorics
        return variance.clamp_min(torch.finfo(variance.dtype).tiny)

    def _fitting(self, y: Tensor) -> Tensor:
        if y.shape != self.batch_shape:
            raise ValueError(f"y has shape {tuple(y.shape)}, the prediction {tuple(self.batch_shape)}")
        return y

    def __repr__(self) -> str:
        kind = "normal" if len(self.means) == 1 else f"mixture of {len(self.means)} normals"
        return f"RegressionPredictive({kind}, batch_shape={tuple(self.batch_shape)})"


pytree.register_dataclass(RegressionPredictive, serialized_type_name="momentprop.RegressionPredictive")
torch.serialization.add_safe_globals([RegressionPredictive])
