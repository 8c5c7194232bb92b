"""An operator to first order: a linear map of its inputs' deviations, plus independent sources of noise.

For jointly Gaussian X and Z, Stein's lemma gives Cov(g(X), Z) = E[g'(X)] Cov(X, Z). So, seen from any
other variable, every operator acts as a linear map J with J = dE_out / dE_in, the variances held fixed,
plus noise that is uncorrelated with everything before it. The output covariance is then a sum over sources
of noise (engine/backward.py), for which an operator has to say two things: its transposed map, and its noise.

Cotangents of a tensor have K in front, [K, *shape], one row per output whose covariance is wanted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from momentprop.gaussian.normal import root
from momentprop.moments import Moments

# Maps a cotangent of the output to one for each random input, in the order of the arguments; None for an
# input that only lends its shape. Where an operator returns a list, so does its cotangent, with None for what
# nothing depends on.
Pull = Callable[[Any], Sequence[Any]]


class Split(Protocol):
    """Tells which elements of a value belong to which sample."""

    @property
    def batch_first(self) -> bool:
        """Say whether the first dimension is the batch, and nothing else."""

    def __call__(self, rows: Tensor) -> Tensor:
        """[K, *shape] -> [batch, K, elements]."""


class Noise(ABC):
    """Independent sources of noise that an operator brings in."""

    @abstractmethod
    def rows(self, cotangent: Tensor, split: Split) -> Tensor:
        """Products of the cotangent with every source of unit variance: [batch, K, sources]."""

    def covariance(self, cotangent: Tensor, split: Split) -> Tensor:
        """Return what they add to the covariance of the K outputs: [batch, K, K]."""
        rows = self.rows(cotangent, split)
        return torch.bmm(rows, rows.mT)

    def masks(self, cotangent: Tensor) -> list[tuple[Tensor, float]]:
        """Masks among them: kept less dropped times sqrt(p(1-p)), [K, ...], with the drop probability."""
        return []


@dataclass(frozen=True, eq=False)
class Dropped:
    """Elements that are kept or dropped, each by itself: what is lost is value * scale / sqrt(p(1-p))."""

    value: Tensor
    scale: float
    drop_probability: float

    def times(self, gain: Any) -> Dropped:
        return self if gain is None else Dropped(self.value * gain, self.scale, self.drop_probability)


@dataclass(frozen=True, eq=False)
class Diagonal(Noise):
    """Every element has noise of its own, of this variance; `dropped` says which part of it is of masks."""

    variance: Tensor
    dropped: tuple[Dropped, ...] = ()

    def times(self, gain: Any) -> Diagonal:
        if gain is None:
            return self
        return Diagonal(gain * gain * self.variance, tuple([d.times(gain) for d in self.dropped]))

    def plus(self, other: Diagonal) -> Diagonal:
        return Diagonal(self.variance + other.variance, self.dropped + other.dropped)

    def rows(self, cotangent: Tensor, split: Split) -> Tensor:
        return split(cotangent * root(self.variance))

    def covariance(self, cotangent: Tensor, split: Split) -> Tensor:
        """sum over elements of c_k V c_l, per sample."""
        variance = self.variance
        if variance.dim() > 3 and split.batch_first:
            # images with their channels last, as convolutions leave them: the order of a sum's terms is free
            cotangent, variance = cotangent.movedim(2, -1), variance.movedim(1, -1)
        if cotangent.shape[0] == 1:
            return split(cotangent * cotangent * variance).sum(-1, keepdim=True)
        rows = split(cotangent * root(variance))
        return torch.bmm(rows, rows.mT)

    def masks(self, cotangent: Tensor) -> list[tuple[Tensor, float]]:
        return [(cotangent * (d.value * d.scale), d.drop_probability) for d in self.dropped]


@dataclass(frozen=True, eq=False)
class Spread(Noise):
    """Sources that reach several elements at once.

    `along` maps a cotangent to its products with them, [K, batch, ...]. With a drop probability they are
    masks.
    """

    along: Callable[[Tensor], Tensor]
    drop_probability: float | None = None

    def rows(self, cotangent: Tensor, split: Split) -> Tensor:
        return split(self.along(cotangent))

    def masks(self, cotangent: Tensor) -> list[tuple[Tensor, float]]:
        p = self.drop_probability
        return [] if p is None else [(self.along(cotangent), p)]


@dataclass(frozen=True, eq=False)
class Scaled:
    """gain * x, element by element, of the one random input; None stands for gain 1."""

    gain: Any = None


@dataclass(frozen=True, eq=False)
class Mapped:
    """Any linear map, by its transpose."""

    pull: Pull


@dataclass(frozen=True, eq=False)
class Linearization:
    """An operator to first order."""

    map: Scaled | Mapped
    noise: tuple[Noise, ...] = ()
    inner: tuple[Noise, ...] = ()  # of values within: `pull` gives their cotangents behind those of inputs


@dataclass(frozen=True, eq=False)
class Propagated:
    """Holds what a rule returns: moments of the output, and how the operator linearises.

    `linearize` is called in a sweep that goes back, and nowhere else. It may use what the rule has computed.

    >>> import torch, momentprop as mp
    >>> @mp.rule(torch.ops.aten.neg.default, override=True)
    ... def negative(x):
    ...     return mp.Propagated(mp.Moments(-x.mean, x.variance), lambda: mp.scaled(-1.0))
    >>> model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Flatten())
    >>> mp.convert(model, torch.ones(1, 2))(torch.ones(1, 2)).std.tolist()
    [[1.0, 1.0]]
    """

    moments: Any
    linearize: Callable[[], Linearization] | None = None


def scaled(gain: Any = None, *noise: Tensor | Noise | None) -> Linearization:
    """Linearise an operator as out = gain * x + noise, element by element; gain None stands for 1.

    A tensor as noise is the variance of every element's own.

    >>> import torch, momentprop as mp
    >>> mp.scaled(2.0, torch.tensor([0.25])).noise
    (Diagonal(variance=tensor([0.2500]), dropped=()),)
    """
    return Linearization(Scaled(gain), _noises(noise))


def mapped(pull: Pull, *noise: Tensor | Noise | None, inner: Sequence[Noise] = ()) -> Linearization:
    """Linearise an operator as a linear map of its random inputs, plus noise.

    `pull` is the transposed map: it takes a cotangent [K, *output shape] to a list of one cotangent for each
    random input, in the order of the arguments. `inner` is noise of values within the operator, such as the
    steps of a recurrent layer: their cotangents follow in that list. Samples lie in them as in the output.

    >>> import torch, momentprop as mp
    >>> matrix = torch.tensor([[1.0, 2.0, 3.0]])
    >>> part = mp.mapped(lambda cotangent: [cotangent @ matrix])  # of x @ matrix.T
    >>> part.map.pull(torch.ones(1, 1))
    [tensor([[1., 2., 3.]])]
    """
    return Linearization(Mapped(pull), _noises(noise), tuple(inner))


def source(*noise: Tensor | Noise | None) -> Linearization:
    """Linearise an operator without random inputs: its output is noise alone.

    >>> import torch, momentprop as mp
    >>> mp.source(torch.tensor([0.25])).noise
    (Diagonal(variance=tensor([0.2500]), dropped=()),)
    """
    return Linearization(Mapped(lambda cotangent: []), _noises(noise))


def _noises(given: Sequence[Tensor | Noise | None]) -> tuple[Noise, ...]:
    return tuple([Diagonal(n) if isinstance(n, Tensor) else n for n in given if n is not None])


def residual(out: Tensor, gain: Any, variance: Tensor) -> Tensor:
    """Variance that the gain does not explain: V_out - G^2 V, never negative."""
    return (out - gain * gain * variance).clamp_min(0)


def moments_of(result: Any) -> Any:
    """The moments in a rule's answer."""
    return result.moments if isinstance(result, Propagated) else result


def propagated(result: Any) -> Propagated:
    """A rule's answer in one form."""
    return result if isinstance(result, Propagated) else Propagated(result)


def weighted_inputs(out: Moments, *inputs: tuple[Any, Tensor]) -> Linearization:
    """Linearise a weighted sum of inputs, which broadcast; the rest of the variance is noise."""
    random = [(x, weight) for x, weight in inputs if isinstance(x, Moments)]
    noise = out.variance
    for x, weight in random:
        noise = noise - weight * weight * x.variance
    weights = [(weight, x.shape) for x, weight in random]
    return mapped(lambda c: [gathered(c * w, shape) for w, shape in weights], noise.clamp_min(0))


def gathered(cotangent: Tensor, shape: torch.Size) -> Tensor:
    """A cotangent [K, *wide] summed over what was broadcast from the shape."""
    added = cotangent.dim() - 1 - len(shape)
    wide = [d for d in range(len(shape)) if shape[d] == 1 and cotangent.shape[1 + added + d] != 1]
    if wide:
        cotangent = cotangent.sum([1 + added + d for d in wide], keepdim=True)
    return cotangent.sum(list(range(1, 1 + added))) if added else cotangent
